# SPDX-License-Identifier: Apache-2.0
"""`OffloadConfig.from_smp`: configurations of SageMaker model parallel, as they are."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from offload_engine import FixedBounds, GroupWindow, OffloadConfig, PrefetchWindow

V1: dict[str, Any] = {"offload_activations": True, "pipeline_parallel_degree": 2, "microbatches": 4}
V2: dict[str, Any] = {"sm_activation_offloading": True, "activation_loading_horizon": 2}


def test_settings_as_they_are() -> None:
    cases: list[tuple[dict[str, Any], Any]] = [
        ({}, GroupWindow(2)),
        ({**V2, "activation_loading_horizon": 7}, GroupWindow(7)),
        (V1, PrefetchWindow(4)),
        ({**V1, "activation_loading_horizon": 6}, PrefetchWindow(6)),
        # PyTorch's own offload, without overlap.
        ({**V2, "sm_activation_offloading": False}, FixedBounds(horizon_bytes=0, max_inflight_bytes=0)),
    ]
    for settings, policy in cases:
        assert OffloadConfig.from_smp(settings) == OffloadConfig(policy=policy), settings


def test_a_json_file_whose_other_keys_are_left_to_smp_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "smp.json"
    path.write_text(json.dumps({**V2, "tensor_parallel_degree": 2, "hybrid_shard_degree": 8}))
    with caplog.at_level(logging.INFO, "offload_engine"):
        for file in (path, str(path), V2):
            assert OffloadConfig.from_smp(file) == OffloadConfig(policy=GroupWindow(2))
    named = "settings of SMP without effect on activation offload: hybrid_shard_degree, tensor_parallel_degree"
    assert caplog.messages == [named, named]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"activation_loading_horizn": 1}, "unknown key 'activation_loading_horizn' .*; did you mean '"),
        ({"offload_activations": False}, "this SMP configuration asks for no offload"),
        ({**V2, "offload_activations": True}, "got both: remove one"),
        ({"sm_activation_offloading": 1}, "sm_activation_offloading must be true or false, got 1"),
        *(({**V2, "activation_loading_horizon": value}, "a positive integer, got ") for value in (0, True, "2", None)),
        (3, "a mapping or the path of a JSON file, got"),
        ("nowhere/smp.json", "No such file.*smp.json"),
        (__file__, "test_smp.py is not a JSON file: "),
    ],
)
def test_what_is_wrong_is_refused(settings: Any, message: str) -> None:
    with pytest.raises((OSError, TypeError, ValueError), match=message):
        OffloadConfig.from_smp(settings)
