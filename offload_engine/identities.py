# SPDX-License-Identifier: Apache-2.0
"""Defines the identity functions that mark the start and the end of a group in the autograd graph.

Separate from `functions.py`, which is compiled: a class with a metaclass cannot be.
"""

from __future__ import annotations

from typing import Any

import torch

from offload_engine.chunk import ChunkOffloadHandler
from offload_engine.traits import GroupTraits


class GroupStartFunction(torch.autograd.Function):
    """Identity on the input of a bracketed submodule. Its backward is the end of the group's backward."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, chunk: ChunkOffloadHandler, name: str, traits: GroupTraits | None = None
    ) -> torch.Tensor:
        """Open the group `name` of `chunk`."""
        ctx.chunk = chunk
        chunk.open_group(name, traits)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """End the backward of the group; the gradient passes unchanged."""
        ctx.chunk.on_group_start_backward()
        return grads[0], None, None, None


class GroupCommitFunction(torch.autograd.Function):
    """Identity on the output of a bracketed submodule. Its backward is the start of the group's backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, chunk: ChunkOffloadHandler) -> torch.Tensor:
        """Commit the open group of `chunk`."""
        ctx.chunk = chunk
        ctx.group = chunk.on_group_commit_forward()
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Begin the backward of the group; the gradient passes unchanged."""
        ctx.chunk.on_group_commit_backward(ctx.group)
        return grads[0], None
