# SPDX-License-Identifier: Apache-2.0
"""`ChunkOffloadHandler`: handles the groups of one forward of one model chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from offload_engine._chunk.group_stack import GroupStack
from offload_engine._chunk.saved_tensors import SavedTensorHooks
from offload_engine._compat.te_base import HandlerBase
from offload_engine._policy.executor import Executor
from offload_engine._saved.handles import PackedTensor
from offload_engine._saved.storage import TensorGroup
from offload_engine.group_boundaries import GroupBoundaries
from offload_engine.planning.moves import (
    BACKWARD_END,
    CHUNK_BACKWARD,
    FORWARD,
    FORWARD_END,
    HEAD,
    LAUNCH,
    LOSS_DONE,
    TAIL,
    UNKEEP,
)
from offload_engine.schedule import ChunkKey
from offload_engine.traits import GroupTraits


class ChunkOffloadHandler(HandlerBase):
    """Brackets the groups of one chunk and reports their boundaries. Made by `OffloadEngine.start_chunk`.

    It keeps the contract of TransformerEngine's `AsyncDoubleBufferGroupOffloadHandler`, so that library's
    `CpuOffloadHookWithOffloadHandler` and `GroupCommitFunction` can drive it for a stack of layers: without an open
    group, a push opens one and the next commit closes it. Unlike its base it shares streams and host memory with all
    chunks, has no window map, and supports any number of microbatches in flight.

    Args:
        key: virtual stage and microbatch.
        executor: called at each boundary.
        keep_groups: indices of the groups that stay resident.
        num_offload_group: groups from this index on stay resident too; None: no bound.
        tensor_need_offloading_checker: returns whether a saved tensor may move; None: all may.
        double_buffering: must be False.
        has_head: the backward comes at once, and `begin_head` will be called before the loss.

    Attributes:
        key: virtual stage and microbatch.
        boundaries: opens and commits the groups.
        groups: the groups of this forward so far, in order, by iteration or index; `innermost` is the open one.
        hooks: packs the tensors that autograd saves.

    Raises:
        NotImplementedError: if `double_buffering` is True.
    """

    def __init__(
        self,
        key: ChunkKey,
        executor: Executor,
        *,
        keep_groups: frozenset[int] = frozenset(),
        num_offload_group: int | None = None,
        tensor_need_offloading_checker: Callable[[torch.Tensor], bool] | None = None,
        double_buffering: bool = False,
        has_head: bool = False,
    ) -> None:
        if double_buffering:
            raise NotImplementedError(
                "double_buffering=True is not supported: with it TransformerEngine's handler returns wrong data as "
                "soon as its windows are uneven. Leave it off; copy-ins are prefetched into fresh buffers anyway."
            )
        # Skip the base's own __init__, which makes two streams per instance and the window map.
        bound = 2**63 - 1 if num_offload_group is None else num_offload_group
        self.groups: GroupStack = GroupStack(key, keep_groups, bound, has_head)
        self.boundaries: GroupBoundaries = GroupBoundaries(executor, self.groups)
        super(HandlerBase, self).__init__(bound, tensor_need_offloading_checker or _any_tensor)
        del self.current_group  # the base's would stay at 0; `boundaries` has it
        self.key: ChunkKey = key
        self._executor = executor
        self.hooks: SavedTensorHooks = SavedTensorHooks(executor.store, self.groups, tensor_need_offloading_checker)

    def __repr__(self) -> str:
        return f"<ChunkOffloadHandler stage {self.key.stage} microbatch {self.key.microbatch}>"

    # -- groups ------------------------------------------------------------------------------------------------------

    def open_group(self, name: str, traits: GroupTraits | None = None) -> TensorGroup:
        """Open a group: tensors saved until `close_group` belong to it.

        Args:
            name: used in statistics, recordings and errors.
            traits: known facts about the group.

        Raises:
            OffloadError: while a CUDA graph is being captured.
        """
        return self.boundaries.open(name, traits)

    def close_group(self, *, keep: bool = False, ends_layer: bool = False) -> TensorGroup:
        """Commit the innermost open group: its copy-out is issued, unless the policy keeps or delays it.

        Args:
            keep: the backward comes at once, so the group stays, whatever the policy.
            ends_layer: it is the last group of its layer, from which `ResidentLayers` learns.

        Raises:
            OffloadError: if no group is open.
            CopyError: if the copy-out of an earlier group has failed.
        """
        self.tensor_count_current_group = 0
        return self.boundaries.close(keep, ends_layer)

    def abandon_group(self) -> None:
        """Abandon the innermost open group, whose forward raised. Its saved tensors are freed with their graph."""
        if self.groups.open_groups:
            self.groups.open_groups.pop().is_kept = False

    def offload_kept_groups(self, name: str | None = None) -> None:
        """Copy out kept groups whose backward does not come at once after all, for instance before another forward.

        Args:
            name: name of the groups; None: all groups.
        """
        for group in self.groups:
            if group.is_kept and group.storages and name in (None, group.name):
                self._executor.at(UNKEEP, self.groups.progress, group)

    def recall_groups(self) -> None:
        """Recall groups that are being copied out, because the backward comes next."""
        self._executor.turn_around(self.groups.progress)

    def saved_tensors_hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return a context manager for the forward of a group: tensors saved inside it belong to the group."""
        return self.hooks.in_group()

    # -- boundaries of the chunk -------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Mark the start of the forward. Called by `OffloadEngine.start_chunk`."""
        self._executor.at(FORWARD, self.groups.progress)

    def begin_tail(self, block_input: torch.Tensor | None = None) -> None:
        """Mark the start of the last block of the forward, which may contain groups.

        Its run time hides the copies issued so far, so the next backward can wait for them at no cost.

        Args:
            block_input: its input, if that requires grad; the backward of the block ends when the gradient arrives.
        """
        self.groups.progress.begin_tail(has_end=block_input is not None)
        self._executor.at(TAIL, self.groups.progress)
        if block_input is not None:
            block_input.register_hook(lambda _: self._end_tail())

    def _end_tail(self) -> None:
        if self.groups.progress.awaits_tail:  # memory has peaked, so a first group may be copied in
            self._executor.at(BACKWARD_END, self.groups.progress)

    def begin_head(self) -> None:
        """Mark the end of the layers: releases copy-outs, to make room for logits and loss.

        Idempotent. No-op without `has_head`: then the first kept group is the mark.
        """
        if self.groups.progress.has_head:
            self._executor.at(HEAD, self.groups.progress)

    def end_forward(self) -> None:
        """Mark the end of the forward: from now on the groups may be prefetched. Idempotent.

        Without this call the next forward, or this chunk's own backward, marks it.
        """
        self._executor.at(FORWARD_END, self.groups.progress)

    def begin_backward(self) -> None:
        """Mark the start of the chunk's backward: releases earlier copy-outs so that backward can reuse their memory.

        Idempotent. Without this call the backward of the first group is the mark, which may come after the peak.
        """
        self._executor.at(CHUNK_BACKWARD, self.groups.progress)

    def end_loss(self) -> None:
        """Mark that the backward has passed the loss and freed its memory: prefetch of the groups begins.

        Without this call prefetch starts with the backward of the last group. If the forward had a tail, groups before
        the last layer are copied in one layer ahead and no earlier: the tail's backward needs memory in large pieces.
        """
        self._executor.at(LOSS_DONE, self.groups.progress)

    def note_launch(self) -> None:
        """Mark that the device, after a wait for the host, has work again: issues delayed copy-outs.

        A running copy slows the host down: a read of uncached memory takes two to four times as long. So groups with
        `GroupTraits.may_delay` are not copied until this call, the commit of a group without delay, the start of the
        last block, or the end of the forward.

        Raises:
            OffloadError: if the host tier is full and `host_policy` is "error".
            CopyError: if an earlier copy has failed.
        """
        self._executor.at(LAUNCH, self.groups.progress)

    # -- contract of TransformerEngine's handler ---------------------------------------------------------------------

    def tensor_push(self, tensor: torch.Tensor, **kwargs: Any) -> Any:
        """Pack one saved tensor; return a handle, or the tensor itself if it stays."""
        if not self.groups.open_groups:
            self.open_group("layer")
        self.tensor_count_current_group += 1
        packed = self.hooks.pack_plain(tensor, self.groups.open_groups[-1])
        return packed if isinstance(packed, PackedTensor) else packed.unpack()

    def tensor_pop(self, tensor_tag: Any, **kwargs: Any) -> torch.Tensor:
        """Unpack a result of `tensor_push`; may be called more than once, as for a retained graph."""
        if not isinstance(tensor_tag, PackedTensor):
            return tensor_tag
        return self._executor.store.unpack(tensor_tag)

    def on_group_commit_forward(self) -> TensorGroup | None:
        """Close the open group; no-op if none is open, as in evaluation."""
        return self.close_group() if self.groups.open_groups else None

    def on_group_commit_backward(self, group: TensorGroup | None = None) -> None:
        """Begin the backward of `group`; None, which TransformerEngine's function passes, means the next one down."""
        self.boundaries.begin_backward(group)

    def on_group_start_backward(self) -> None:
        """End the backward of a group."""
        self._executor.at(BACKWARD_END, self.groups.progress)

    def bulk_offload_group(self, group_to_offload: int) -> None:
        """Copy out the group with this index. No-op for storages that have been copied out already."""
        with self._executor.store.retired as retired, retired.lock:
            self._executor.copy_out(self._group(group_to_offload))

    def bulk_reload_group(self, group_to_reload: int) -> None:
        """Copy in the group with this index, or recall its copy-out. No-op for resident storages."""
        with self._executor.store.retired as retired, retired.lock:
            self._executor.copy_in(self._group(group_to_reload))

    def _group(self, index: int) -> TensorGroup:
        if not 0 <= index < len(self.groups):
            raise IndexError(f"{self!r} has {len(self.groups)} groups and no group {index}")
        return self.groups[index]


def _any_tensor(_: torch.Tensor) -> bool:
    return True
