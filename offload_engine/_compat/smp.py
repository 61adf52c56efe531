# SPDX-License-Identifier: Apache-2.0
"""Reads the activation-offload settings of a SageMaker model parallel (SMP) configuration. Needs no torch."""

from __future__ import annotations

import difflib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload_engine.policies import FixedBounds, GroupWindow, PolicySettings, PrefetchWindow

logger = logging.getLogger(__name__)

HORIZON = "activation_loading_horizon"
SWITCH_V2 = "sm_activation_offloading"
SWITCH_V1 = "offload_activations"


def smp_policy(config: Mapping[str, Any] | str | os.PathLike[str]) -> PolicySettings:
    """Return the policy that corresponds to an SMP configuration.

    Raises:
        TypeError: if the configuration, or a value in it, has the wrong type.
        ValueError: if a value is outside its range, or the configuration asks for no offload.
        OSError: if the file cannot be read.
    """
    found = config if isinstance(config, Mapping) else _read(config)
    if SWITCH_V1 in found and SWITCH_V2 in found:
        raise ValueError(
            f"an SMP configuration has {SWITCH_V2!r} (SMP v2) or {SWITCH_V1!r} (SMP v1), got both: remove one"
        )
    _log_other_keys(found)
    return _policy_v1(found) if SWITCH_V1 in found else _policy_v2(found)


def _policy_v2(config: Mapping[str, Any]) -> PolicySettings:
    horizon = _positive(config, default=2)
    if _boolean(config, SWITCH_V2, default=True):
        return GroupWindow(horizon)
    logger.warning(
        "%s is false, which in SMP means PyTorch's own offload: copies are not overlapped, and %s does not apply",
        SWITCH_V2,
        HORIZON,
    )
    return FixedBounds(horizon_bytes=0, max_inflight_bytes=0)


def _policy_v1(config: Mapping[str, Any]) -> PolicySettings:
    horizon = _positive(config, default=4)
    if not _boolean(config, SWITCH_V1, default=False):
        raise ValueError(
            f"{SWITCH_V1} is false: this SMP configuration asks for no offload. Set it to true, or wrap no model"
        )
    return PrefetchWindow(horizon)


def _boolean(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise TypeError(f"{key} must be true or false, got {value!r}")
    return value


def _positive(config: Mapping[str, Any], default: int) -> int:
    value = config.get(HORIZON, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{HORIZON} must be a positive integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{HORIZON} must be a positive integer, got {value}")
    return value


def _log_other_keys(config: Mapping[str, Any]) -> None:
    """Log the keys that have no effect here; raise for a misspelt one of ours, which would be ignored silently."""
    ours = (HORIZON, SWITCH_V2, SWITCH_V1)
    others = sorted(str(key) for key in config if key not in ours)
    for key in others:
        for meant in difflib.get_close_matches(key, ours, n=1, cutoff=0.85):
            raise ValueError(f"unknown key {key!r} in an SMP configuration; did you mean {meant!r}?")
    if others:
        logger.info("settings of SMP without effect on activation offload: %s", ", ".join(others))


def _read(path: object) -> Mapping[str, Any]:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"an SMP configuration is a mapping or the path of a JSON file, got {path!r}")
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not text
        raise ValueError(f"{os.fspath(path)} is not a JSON file: {error}") from error
    if not isinstance(found, dict):
        raise TypeError(f"{os.fspath(path)} must hold a JSON object, got {type(found).__name__}")
    return found
