"""Losses and gradients of small steps, to the last bit: eager and captured, with and without offload."""

from __future__ import annotations

import gc
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
    """Run each step in this process, and tell its bits."""
    for name, settings in STEPS.items():
        own = {"part": None, "is_captured": False, "policy": "lowest", **settings}
        run_whole(shape, rounds=1, emit=partial(emit, of=name), exact=True, **own)
        _forget()
    for name, part in {"layers": None, "layers qkv": "qkv", "layers mlp": "mlp"}.items():
        run_layers(shape, part, 1, partial(emit, of=name), exact=True)
        _forget()


def _forget() -> None:
    """Free what the last step has used: its graphs are in cycles."""
    gc.collect()
    torch.cuda.empty_cache()
