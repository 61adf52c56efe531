# SPDX-License-Identifier: Apache-2.0
"""The settings that a budget competes with, and the budget itself: each is put on the model and taken off again."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from benchmarks.frontends.contenders import Ours, make_contender, put_layers
from benchmarks.frontends.link_bound import saved_bytes_per_token
from benchmarks.frontends.workload import Attach, Attached, Workload, attaching
from offload_engine import LowestPeak, OffloadConfig, ResidentBudget, ResidentLayers

from .report import TITLES


def settings_by_hand(device: str, workload: Workload) -> dict[str, Attach]:
    """Return the settings of `TITLES` that can run here, in their order."""
    ours = Ours(_engine_settings(device), 4096 if device == "cpu" else None)
    shared = {name: make_contender(name, ours, None) for name in ("none", "any_model", "ckpt")}
    num_layers = len(workload.layers)
    saved = saved_bytes_per_token(workload.shape) * workload.num_tokens * num_layers
    found = {
        **shared,
        "all": layers(device, policy=LowestPeak()),
        "layers": layers(device),
        "half_layers": layers(device, policy=ResidentLayers(max(2, num_layers // 2))),
        "layers_ckpt": layers(device, enable_ckpt=True),
        "every_other": layers(device, every=2),
        "half_ckpt": layers(device, every=2, enable_ckpt=True),
        "bytes_1/3": layers(device, policy=ResidentBudget(saved // 3)),
        "bytes_2/3": layers(device, policy=ResidentBudget(2 * saved // 3)),
    }
    if device == "cpu":  # only an engine counts what is saved there
        found["none"] = layers(device, dry_run=True)
        del found["ckpt"]
    return {name: found[name] for name in TITLES if name in found}


def layers(device: str, *, enable_ckpt: bool = False, every: int = 1, **settings: Any) -> Attach:
    """Return `enable_activation_offloading` of each `every`-th layer; `settings` are of `OffloadConfig`."""
    config = OffloadConfig(**{**_engine_settings(device), **settings})

    def put(workload: Workload, stack: ExitStack) -> Attached:
        return put_layers(workload, stack, config, enable_ckpt, list(workload.layers)[::every])

    return attaching(put)


def _engine_settings(device: str) -> dict[str, Any]:
    return {"min_tensor_bytes": 0, "directory": "none"} if device == "cpu" else {}
