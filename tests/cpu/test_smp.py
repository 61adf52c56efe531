# SPDX-License-Identifier: Apache-2.0
"""`OffloadConfig.from_smp`: configurations of SageMaker model parallel, as they are."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from offload_engine import FixedBounds, GroupWindow, OffloadConfig, PrefetchWindow

V2 = {"sm_activation_offloading": True, "activation_loading_horizon": 2}


def test_v2_defaults() -> None:
    assert OffloadConfig.from_smp({}) == OffloadConfig(policy=GroupWindow(2))
    assert OffloadConfig.from_smp({"sm_activation_offloading": True}) == OffloadConfig(policy=GroupWindow(2))


@pytest.mark.parametrize("as_text", [str, Path])
def test_a_json_file(tmp_path: Path, as_text: type) -> None:
    path = tmp_path / "smp.json"
    path.write_text(json.dumps({**V2, "hybrid_shard_degree": 8}))
    assert OffloadConfig.from_smp(as_text(path)) == OffloadConfig(policy=GroupWindow(2))


def test_other_keys_are_left_to_smp_and_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "offload_engine"):
        OffloadConfig.from_smp({**V2, "tensor_parallel_degree": 2, "hybrid_shard_degree": 8, "random_seed": 1})
    assert caplog.messages == [
        "left to SMP, without effect on activation offload: hybrid_shard_degree, random_seed, tensor_parallel_degree"
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO, "offload_engine"):
        OffloadConfig.from_smp(V2)
    assert not caplog.messages


@pytest.mark.parametrize("key", ["activation_loading_horizn", "sm_activation_offload", "sm_activations_offloading"])
def test_a_misspelt_key_is_an_error(key: str) -> None:
    with pytest.raises(ValueError, match=f"unknown key '{key}' in an SMP configuration; did you mean '"):
        OffloadConfig.from_smp({key: 1})


def test_false_in_v2_offloads_without_overlap_as_pytorch_does(caplog: pytest.LogCaptureFixture) -> None:
    config = OffloadConfig.from_smp({**V2, "sm_activation_offloading": False})
    assert config == OffloadConfig(policy=FixedBounds(horizon_bytes=0, max_inflight_bytes=0))
    assert "sm_activation_offloading is false, which in SMP means PyTorch's own offload" in caplog.text


def test_v1_says_how_early_to_load() -> None:
    v1 = {"offload_activations": True, "pipeline_parallel_degree": 2, "microbatches": 4}
    assert OffloadConfig.from_smp(v1) == OffloadConfig(policy=PrefetchWindow(4))
    assert OffloadConfig.from_smp({**v1, "activation_loading_horizon": 6}) == OffloadConfig(policy=PrefetchWindow(6))


def test_both_versions_at_once_are_an_error() -> None:
    with pytest.raises(ValueError, match="got both: remove one"):
        OffloadConfig.from_smp({**V2, "offload_activations": True})


@pytest.mark.parametrize("switch", ["sm_activation_offloading", "offload_activations"])
@pytest.mark.parametrize("value", [1, 0, "true", None])
def test_the_switch_is_a_boolean(switch: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{switch} must be true or false, got {value!r}"):
        OffloadConfig.from_smp({switch: value})


@pytest.mark.parametrize("switch", ["sm_activation_offloading", "offload_activations"])
@pytest.mark.parametrize("value", [0, -1, True, False, 2.0, "2", None, [2]])
def test_the_horizon_is_a_positive_integer(switch: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="activation_loading_horizon must be a positive integer, got "):
        OffloadConfig.from_smp({switch: True, "activation_loading_horizon": value})


def test_other_objects_are_refused_as_configuration(tmp_path: Path) -> None:
    for wrong in (3, None, [("activation_loading_horizon", 2)]):
        with pytest.raises(TypeError, match="a mapping or the path of a JSON file, got"):
            OffloadConfig.from_smp(wrong)  # type: ignore[arg-type]
    path = tmp_path / "smp.json"
    with pytest.raises(FileNotFoundError, match="smp.json"):
        OffloadConfig.from_smp(path)
    path.write_text("activation_loading_horizon: 2")
    with pytest.raises(ValueError, match="smp.json is not a JSON file: "):
        OffloadConfig.from_smp(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="smp.json is not a JSON file: "):
        OffloadConfig.from_smp(path)
    path.write_text("[2]")
    with pytest.raises(TypeError, match="smp.json must hold a JSON object, got list"):
        OffloadConfig.from_smp(path)
