# SPDX-License-Identifier: Apache-2.0
"""What both benchmarks time to learn the host cost of a group: a chain of groups that each save three tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload_engine import ChunkOffloadHandler, group_commit


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
