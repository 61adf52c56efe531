# SPDX-License-Identifier: Apache-2.0
"""OffloadConfig: accepted values, and the errors for others."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from offload_engine.config import MIB, OffloadConfig
from offload_engine.policies import ResidentBudget


@pytest.mark.parametrize(
    ("error", "message", "settings"),
    [
        (ValueError, "min_tensor_bytes must not be negative, got -1", {"min_tensor_bytes": -1}),
        (ValueError, "host_limit_bytes must not be negative, got -8", {"host_limit_bytes": -8}),
        *(
            (TypeError, f"{name} must be an integer number of bytes", {name: value})
            for name in ("min_tensor_bytes", "host_limit_bytes")
            for value in (1.5, 1e6, "1MiB", True)
        ),
        (TypeError, "min_tensor_bytes", {"min_tensor_bytes": None}),
        (ValueError, "host_policy must be one of keep, error, got 'spill'", {"host_policy": "spill"}),
        (ValueError, "more than any storage has: nothing could ever be off", {"min_tensor_bytes": 2**70}),
        (ValueError, "nothing could ever be offloaded. Raise the limit or lower", {"host_limit_bytes": MIB - 1}),
        (TypeError, "directory must be a path, 'none' or None, got 3", {"directory": 3}),
        (TypeError, "dry_run must be True or False, got 'false'", {"dry_run": "false"}),
    ],
)
def test_bad_values_are_refused(error: type[Exception], message: str, settings: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        OffloadConfig(**settings)
    with pytest.raises(error, match=message):
        OffloadConfig().replace(**settings)


def test_values_at_the_limits_and_defaults() -> None:
    config = OffloadConfig()
    assert (config.min_tensor_bytes, config.host_limit_bytes, config.directory, config.dry_run) == (
        MIB,
        None,
        None,
        False,
    )
    assert OffloadConfig(min_tensor_bytes=2**40).replace(host_limit_bytes=2**40).min_tensor_bytes == 2**40
    assert OffloadConfig(min_tensor_bytes=0, host_limit_bytes=0).host_limit_bytes == 0
    assert OffloadConfig(directory="/somewhere").directory == "/somewhere"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.min_tensor_bytes = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        OffloadConfig(MIB)  # type: ignore[call-arg]


def test_sizes_of_a_command_line_are_taken_as_people_type_them() -> None:
    config = OffloadConfig.from_flags(min_tensor_bytes="64KiB", host_limit_bytes="1.5 GB", resident_bytes="2g")
    policy = ResidentBudget(2 << 30)
    assert config == OffloadConfig(min_tensor_bytes=65536, host_limit_bytes=1_500_000_000, policy=policy)
    for text, message in (("x", "min_tensor_bytes: 'x' is not a size"), ("50%", "min_tensor_bytes: '50%' depends on")):
        with pytest.raises(ValueError, match=message):
            OffloadConfig.from_flags(min_tensor_bytes=text)
