# SPDX-License-Identifier: Apache-2.0
"""OffloadConfig: accepted values, and the errors for others."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from offload_engine.config import MIB, OffloadConfig
from offload_engine.policies import ResidentBudget

SIZES = ["min_tensor_bytes", "host_limit_bytes"]
OPTIONAL_SIZES = SIZES[1:]


def test_defaults() -> None:
    config = OffloadConfig()
    assert config.min_tensor_bytes == MIB == 1024 * 1024
    assert all(getattr(config, name) is None for name in [*OPTIONAL_SIZES, "directory"])
    assert config.dry_run is False


def test_is_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        OffloadConfig().min_tensor_bytes = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        OffloadConfig(MIB)  # type: ignore[misc]


@pytest.mark.parametrize("name", SIZES)
def test_negative_size_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must not be negative, got -1"):
        OffloadConfig.from_flags(**{name: -1})


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [1.5, 1e6, "1MiB", True, False])
def test_non_integer_size_is_refused(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"{name} must be an integer number of bytes"):
        OffloadConfig(**{name: value})


def test_sizes_of_a_command_line_are_taken_as_people_type_them() -> None:
    config = OffloadConfig.from_flags(min_tensor_bytes="64KiB", host_limit_bytes="1.5 GB", resident_bytes="2g")
    policy = ResidentBudget(2 << 30)
    assert config == OffloadConfig(min_tensor_bytes=65536, host_limit_bytes=1_500_000_000, policy=policy)
    assert OffloadConfig.from_flags(directory="none").directory == "none"
    for text, message in (("x", "min_tensor_bytes: 'x' is not a size"), ("50%", "min_tensor_bytes: '50%' depends on")):
        with pytest.raises(ValueError, match=message):
            OffloadConfig.from_flags(min_tensor_bytes=text)


def test_unknown_host_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="host_policy must be one of keep, error, got 'spill'"):
        OffloadConfig(host_policy="spill")  # type: ignore[arg-type]


def test_threshold_cannot_be_none() -> None:
    with pytest.raises(TypeError, match="min_tensor_bytes"):
        OffloadConfig(min_tensor_bytes=None)  # type: ignore[arg-type]


def test_zero_is_a_size() -> None:
    config = OffloadConfig(min_tensor_bytes=0, host_limit_bytes=0)
    assert all(getattr(config, name) == 0 for name in SIZES)


def test_a_threshold_above_any_storage_is_refused() -> None:
    with pytest.raises(ValueError, match="more than any storage has: nothing could ever be offloaded"):
        OffloadConfig(min_tensor_bytes=2**70)
    assert OffloadConfig(min_tensor_bytes=2**40).min_tensor_bytes == 2**40


def test_limit_below_threshold_is_refused_and_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="nothing could ever be offloaded. Raise the limit or lower the threshold"):
        OffloadConfig(host_limit_bytes=MIB - 1)
    assert OffloadConfig(host_limit_bytes=MIB).host_limit_bytes == MIB


@pytest.mark.parametrize("directory", ["none", "/somewhere", Path("/somewhere"), None])
def test_directory_accepts_paths(directory: str | None) -> None:
    assert OffloadConfig(directory=directory).directory == directory


def test_directory_refuses_other_types() -> None:
    with pytest.raises(TypeError, match="directory must be a path, 'none' or None, got 3"):
        OffloadConfig(directory=3)  # type: ignore[arg-type]


def test_a_word_for_dry_run_is_not_taken_for_true() -> None:
    with pytest.raises(TypeError, match="dry_run must be True or False, got 'false'"):
        OffloadConfig(dry_run="false")  # type: ignore[arg-type]


def test_replace_keeps_the_rest_and_validates() -> None:
    config = OffloadConfig(min_tensor_bytes=10, host_limit_bytes=70)
    changed = config.replace(host_limit_bytes=80)
    assert (changed.min_tensor_bytes, changed.host_limit_bytes) == (10, 80)
    assert config.host_limit_bytes == 70
    with pytest.raises(ValueError, match="host_limit_bytes"):
        config.replace(host_limit_bytes=-8)


def test_every_field_has_a_docstring() -> None:
    source = Path(__file__).parents[2].joinpath("offload_engine/config.py").read_text()
    for field in dataclasses.fields(OffloadConfig):
        declaration = source.split(f"    {field.name}: ", 1)[1]
        assert declaration.split("\n", 2)[1].strip().startswith('"""'), f"{field.name} has no docstring"
