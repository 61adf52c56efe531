"""What marks in the graph where a group begins and ends, in forward and in backward: hooks and autograd identities.

An identity returns an alias of its input that is not a view of it, so a model may go on to modify it in place.
"""

from __future__ import annotations

from typing import Any

import torch

from offload_engine._saved.storage import TensorGroup
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
        """Tell the chunk; the gradient passes unchanged."""
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
        """Tell the chunk; the gradient passes unchanged."""
        ctx.chunk.on_group_commit_backward(ctx.group)
        return grads[0], None


class _BackwardBegins:
    """Hook in front of the last node of a group."""

    __slots__ = ("_chunk", "_group")

    def __init__(self, chunk: ChunkOffloadHandler, group: TensorGroup | None) -> None:
        self._chunk = chunk
        self._group = group

    def __call__(self, grads: tuple[torch.Tensor, ...]) -> None:
        self._chunk.on_group_commit_backward(self._group)


def group_start(
    tensor: torch.Tensor, chunk: ChunkOffloadHandler, name: str, traits: GroupTraits | None = None
) -> torch.Tensor:
    """Open the group `name` of `chunk` in front of a submodule; use the returned tensor as its input.

    Do not mark an input that the submodule writes into in place and that is used again behind it: autograd sees that
    write on the returned alias only. Nor one that others read too, where the last bit matters: its gradients are then
    summed in another order. `ChunkOffloadHandler.open_group` opens a group without a mark.
    """
    return GroupStartFunction.apply(tensor, chunk, name, traits)


def group_commit(tensor: torch.Tensor, chunk: ChunkOffloadHandler) -> torch.Tensor:
    """Commit the open group of `chunk` behind a submodule; use the returned tensor as its output."""
    group, node = chunk.innermost_group, tensor.grad_fn
    if group is not None and node is not None and not group.storages and not group.has_made(node):
        # What the group was given, as an identity returns it: there is nothing to bring back, and a mark would gather
        # the gradients of its readers here, before those of others are added.
        chunk.on_group_commit_forward()
        return tensor
    if group is None or node is None or not group.has_made(node) or tensor._is_view():
        # Its node would not do. It runs its backward long after the group's where the group did not compute the tensor,
        # and never where the model goes on to write into a view.
        return GroupCommitFunction.apply(tensor, chunk)
    # The group's backward begins with this node: a hook there takes a fourth of the time of an identity behind it.
    node.register_prehook(_BackwardBegins(chunk, chunk.on_group_commit_forward()))
    return tensor
