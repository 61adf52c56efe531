# SPDX-License-Identifier: Apache-2.0
"""Marks the start and end of a group in the autograd graph, by hooks and identity functions.

An identity returns an alias of its input that is not a view of it, so a model may modify it in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from offload_engine._saved.storage import TensorGroup
from offload_engine.chunk import ChunkOffloadHandler
from offload_engine.identities import GroupCommitFunction, GroupStartFunction
from offload_engine.traits import GroupTraits

_apply_start: Final[Any] = GroupStartFunction.apply
_apply_commit: Final[Any] = GroupCommitFunction.apply


class _BackwardBegins:
    """Begins the backward of a group; pre-hook of its last node, which runs first."""

    __slots__ = ("_begin", "_group")

    def __init__(self, begin: Callable[[TensorGroup], None], group: TensorGroup) -> None:
        self._begin = begin
        self._group = group

    def __call__(self, grads: object) -> None:
        self._begin(self._group)


def group_start(
    tensor: torch.Tensor, chunk: ChunkOffloadHandler, name: str, traits: GroupTraits | None = None
) -> torch.Tensor:
    """Open the group `name` of `chunk` before a submodule; use the returned tensor as its input.

    Do not mark an input that the submodule modifies in place and that is used again after it: autograd sees the write
    on the returned alias only. For bitwise reproducibility, do not mark an input with other readers either: its
    gradients are then summed in another order. `ChunkOffloadHandler.open_group` opens a group without a mark.
    """
    return _apply_start(tensor, chunk, name, traits)


def group_commit(tensor: torch.Tensor, chunk: ChunkOffloadHandler) -> torch.Tensor:
    """Commit the open group of `chunk` after a submodule; use the returned tensor as its output."""
    group, node = chunk.groups.innermost, tensor.grad_fn
    if group is not None and node is not None and not group.storages and not group.has_made(node):
        # The group returned its own input, like an identity: nothing has to be copied in, and a mark would sum the
        # gradients of its readers here, before those of other readers are added.
        chunk.on_group_commit_forward()
        return tensor
    if group is None or node is None or not group.has_made(node) or tensor._is_view():
        # A hook on its node is not enough: if the group did not compute the tensor, the node's backward runs long after
        # the group's; if the model later writes into a view, it never runs.
        return _apply_commit(tensor, chunk)
    # The group's backward begins with this node, and a hook on it costs a fraction of an identity after it.
    boundaries = chunk.boundaries
    _call_before(node, tensor, _BackwardBegins(boundaries.begin_backward, boundaries.close()))
    return tensor


def _call_before(node: torch.autograd.graph.Node, tensor: torch.Tensor, hook: Callable[..., None]) -> None:
    """Register `hook` to be called before the backward of `node`, which has made `tensor`.

    Like `node.register_prehook`, but without the handle that could remove it, which takes most of the time.
    """
    if type(tensor) is not torch.Tensor or tensor._backward_hooks is not None:  # the slot below is taken
        node.register_prehook(hook)
        return
    tensor._backward_hooks = {0: hook}
    node._register_hook_dict(tensor)  # the node takes over the dictionary
    tensor._backward_hooks = None
