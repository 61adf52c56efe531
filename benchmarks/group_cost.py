# SPDX-License-Identifier: Apache-2.0
"""Host time of a group, on a GPU or without one: a chain of groups that each save three tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from offload_engine import ChunkOffloadHandler, OffloadEngine, group_commit


class _SaveThree(torch.autograd.Function):
    """Saves three tensors for its backward, as a projection, a norm or an attention kernel does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, saved: Sequence[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(*saved)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        assert len(ctx.saved_tensors) == 3
        return grads[0], None


def forward_groups(
    x: torch.Tensor, tensors: list[list[torch.Tensor]], chunk: ChunkOffloadHandler | None
) -> torch.Tensor:
    """Run the forward of one group for each entry of `tensors`, which it empties: no other reference may hold them.

    A group is opened and closed as the brackets around megatron-core's modules do it: its hooks are pushed and popped,
    and it has a mark at its end alone.
    """
    out = x
    while tensors:
        saved = tensors.pop()
        if chunk is None:
            out = _SaveThree.apply(out, saved)
            continue
        chunk.open_group("module")
        chunk.hooks.push()
        out = _SaveThree.apply(out, saved)
        chunk.hooks.pop()
        out = group_commit(out, chunk)
    return out


def microseconds_of_a_group(engine: OffloadEngine, num_groups: int = 64, repeats: Iterable[int] = range(40)) -> float:
    """Measure host microseconds of one group, forward and backward: noise only adds, so the best of many repeats."""
    managed = unmanaged = float("inf")
    for _ in repeats:
        managed = min(managed, _seconds(engine.device.torch_device, num_groups, engine))
        unmanaged = min(unmanaged, _seconds(engine.device.torch_device, num_groups, None))
    if not engine.stats.copied_out_bytes:
        raise RuntimeError(f"the benchmark is not measuring offload: {engine.stats}")
    return (managed - unmanaged) / num_groups * 1e6


def _seconds(device: torch.device, num_groups: int, engine: OffloadEngine | None) -> float:
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    tensors = [[torch.empty(256, device=device) for _ in range(3)] for _ in range(num_groups)]
    out, grad = torch.ones(8, device=device, requires_grad=True), torch.ones(8, device=device)
    wait()
    begin = time.perf_counter()
    chunk = None
    if engine is not None:
        engine.begin_iteration()
        chunk = engine.start_chunk()
    out = forward_groups(out, tensors, chunk)
    out.backward(grad)
    if engine is not None:
        engine.end_iteration()
    seconds = time.perf_counter() - begin
    wait()
    return seconds
