"""Losses and gradients of small steps, to the last bit: eager and captured, with and without offload."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from graph_probe.layers import run_layers
from graph_probe.stage import Shape
from graph_probe.whole import run_whole

STEPS: dict[str, dict[str, Any]] = {
    "eager": {},
    "graph": {"is_captured": True},
    "eager qkv": {"part": "qkv"},
    "graph qkv": {"part": "qkv", "is_captured": True},
    "eager mlp": {"part": "mlp"},
    "graph mlp": {"part": "mlp", "is_captured": True},
    "graph mlp planned": {"part": "mlp", "is_captured": True, "policy": "planned"},
    "graph mlp 1g": {"part": "mlp", "is_captured": True, "policy": "1g"},
    "graph layer": {"part": "layer", "is_captured": True, "policy": "layers", "per_microbatch": True},
}
"""The first is the reference of all others."""


def run_bits(shape: Shape, emit: Callable[..., None]) -> None:
    """Run each step in this process, and tell its bits. One that fails does not keep the others from running."""
    for name, settings in STEPS.items():
        own = {"part": None, "is_captured": False, "policy": "lowest", **settings}
        _attempt(partial(run_whole, shape, rounds=1, exact=True, **own), partial(emit, of=name))
    for name, part in {"layers": None, "layers qkv": "qkv", "layers mlp": "mlp"}.items():
        _attempt(partial(run_layers, shape, part, 1, exact=True), partial(emit, of=name))


def _attempt(run: Callable[..., None], emit: Callable[..., None]) -> None:
    try:
        run(emit=emit)
    except Exception:
        emit(stage="failed", traceback=traceback.format_exc()[-3000:])
    gc.collect()  # graphs of autograd and their hooks are in cycles
    torch.cuda.empty_cache()
