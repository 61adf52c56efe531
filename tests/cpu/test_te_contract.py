# SPDX-License-Identifier: Apache-2.0
"""The contract of TransformerEngine's offload handler, driven by that library's own hook and function."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from offload_engine import ChunkOffloadHandler, OffloadConfig, OffloadEngine
from offload_engine._compat.te_base import HandlerBase
from tests.adversarial import AdversarialDevice
from tests.engine_state import release_all

NUM_LAYERS = 5
if not HandlerBase.__module__.startswith("transformer_engine."):
    pytest.skip("TransformerEngine is not installed: pip install .[te]", allow_module_level=True)
te: Any = importlib.import_module(HandlerBase.__module__)


@pytest.fixture
def stack() -> torch.nn.ModuleList:
    nn = torch.nn
    blocks = ((nn.LayerNorm(16), nn.Linear(16, 40), nn.GELU(), nn.Linear(40, 16)) for _ in range(NUM_LAYERS))
    return nn.ModuleList(nn.Sequential(*block) for block in blocks)


@pytest.fixture
def engine(device: AdversarialDevice) -> Iterator[OffloadEngine]:
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0), device)
    yield engine
    engine.close()


def forward(stack: torch.nn.ModuleList, x: torch.Tensor, handler: ChunkOffloadHandler | None) -> torch.Tensor:
    for block in stack:
        with nullcontext() if handler is None else te.CpuOffloadHookWithOffloadHandler(handler):
            x = block(x)
        x = x if handler is None else te.GroupCommitFunction.apply(x, handler)
    return x.square().mean()


def check_gradients(stack: torch.nn.ModuleList, handler: ChunkOffloadHandler) -> None:
    """Check that a step with the handler is that without it, to the last bit."""
    x, found = torch.linspace(-1, 1, 8 * 16).view(8, 16), []
    for each in (None, handler):
        stack.zero_grad()
        leaf = x.clone().requires_grad_()
        forward(stack, leaf, each).backward()
        found.append([tensor.grad for tensor in (*stack.parameters(), leaf)])
    assert all(map(torch.equal, *found)) and len(found[0]) > NUM_LAYERS


@pytest.mark.parametrize("num_offload_group", [0, 3, None])
def test_a_stack_of_layers(stack: torch.nn.ModuleList, engine: OffloadEngine, num_offload_group: int | None) -> None:
    """One handler serves pass after pass, with evaluation in between."""
    offloaded = NUM_LAYERS if num_offload_group is None else num_offload_group
    with engine.iteration(weights=stack.parameters()):
        handler = engine.start_chunk(num_offload_group=num_offload_group)
        for _ in range(2):
            check_gradients(stack, handler)
            with torch.no_grad():
                forward(stack, torch.randn(8, 16), handler)
    assert engine.stats.num_offloaded_groups == 2 * offloaded
    assert engine.stats.num_kept_groups == 2 * (NUM_LAYERS - offloaded)
    assert engine.pool.num_leases == 0


def test_a_checker_chooses_what_moves(stack: torch.nn.ModuleList, engine: OffloadEngine) -> None:
    with engine.iteration(weights=stack.parameters()):
        check_gradients(stack, engine.start_chunk(tensor_need_offloading_checker=lambda t: t.shape[-1] == 40))
    # Input and output of gelu.
    assert engine.stats.copied_out_bytes == NUM_LAYERS * 2 * 8 * 40 * 4


def test_groups_move_by_hand_too(engine: OffloadEngine, device: AdversarialDevice) -> None:
    with engine.iteration():
        handler = engine.start_chunk(num_offload_group=0)  # nothing moves by itself
        tag = handler.tensor_push(torch.arange(64.0) * 1)
        handler.on_group_commit_forward()
        handler.bulk_offload_group(0)
        assert engine.stats.copied_out_bytes == 256
        release_all(engine)
        handler.bulk_reload_group(0)
        assert engine.stats.copied_in_bytes == 256
        with device.observe_compute():
            assert torch.equal(handler.tensor_pop(tag), torch.arange(64.0))
        with pytest.raises(IndexError, match="1 groups and no group 1"):
            handler.bulk_reload_group(1)
        del tag
