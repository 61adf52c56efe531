# SPDX-License-Identifier: Apache-2.0
"""Layers in CUDA graphs of their own, replayed: equal bits, with all that is copied back poisoned, in less memory."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from offload_engine import OffloadConfig, OffloadEngine
from offload_engine.captured_layers import CapturedLayers
from tests.program_order import edges_of, unordered

NUM_LAYERS, ROWS, WIDTH, NUM_STEPS = 6, 4096, 1024, 4
LAYER_BYTES = ROWS * WIDTH * 4 * 3  # that only the layer holds: the input of the first linear is static

pytestmark = pytest.mark.usefixtures("deterministic")


def make_layers() -> list[torch.nn.Module]:
    torch.manual_seed(0)
    layers = [
        torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()
        )
        for _ in range(NUM_LAYERS)
    ]
    return [layer.cuda() for layer in layers]


def graphed(layers: Sequence[torch.nn.Module]) -> Sequence[torch.nn.Module]:
    samples = tuple((torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True),) for _ in layers)
    return torch.cuda.make_graphed_callables(tuple(layers), samples)  # type: ignore[return-value]


def steps(layers: Sequence[torch.nn.Module], captured: CapturedLayers | None = None) -> list[list[torch.Tensor]]:
    results = []
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    for step in range(NUM_STEPS):
        torch.manual_seed(step)
        hidden = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
        for layer in layers:
            hidden = layer(hidden)
        hidden.square().sum().backward()
        results.append([parameter.grad.clone() for parameter in parameters if parameter.grad is not None])
        for parameter in parameters:
            parameter.grad = None
        torch.cuda.synchronize()
        if captured is not None:
            poison(captured)
    return results


def poison(captured: CapturedLayers) -> None:
    """Overwrite what replays have to write before they read it: host bytes, and what backwards read on the device."""
    for slab in captured.slabs.by_index.values():
        slab.view(0, slab.nbytes).fill_(0xFF)  # type: ignore[attr-defined]
    for step in captured.steps:
        for copies in step.copy_ins:
            for _, target in copies.copies:
                target.fill_(0xFF)
    torch.cuda.synchronize()


def reserved_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_replays_are_equal_to_the_last_bit_in_less_memory() -> None:
    before = reserved_bytes()
    layers = graphed(make_layers())
    without = reserved_bytes() - before
    expected = steps(layers)
    del layers
    before = reserved_bytes()
    engine = OffloadEngine(OffloadConfig())
    with engine.graphs.capture_layers(min_bytes=1) as captured:
        layers = graphed(make_layers())
    fallen = without - (reserved_bytes() - before)
    assert captured.num_graphs == 2 * NUM_LAYERS and captured.copied_out_bytes > 0
    assert not unordered(captured, edges_of(captured))
    got = steps(layers, captured)
    assert all(all(map(torch.equal, a, b)) for a, b in zip(expected, got, strict=True))
    assert fallen >= 0.5 * captured.copied_out_bytes, (fallen, captured.copied_out_bytes, captured.slot_bytes)
    del layers
    captured.release()
    engine.close()
