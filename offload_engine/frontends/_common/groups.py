"""`AutomaticGroups`: groups without marks in the model or in its graph."""

from __future__ import annotations

from typing import NamedTuple

import torch

from offload_engine._saved.handles import PackedTensor, StayingTensor, without_graph
from offload_engine._saved.storage import TensorGroup
from offload_engine.chunk import ChunkOffloadHandler
from offload_engine.config import MIB
from offload_engine.errors import CopyError
from offload_engine.frontends._common.compiling import untraced
from offload_engine.frontends._common.session import Session, is_in_backward

GROUP_BYTES = 32 * MIB
"""Copied in 0.6 ms at 55 GB/s: many times what the host spends on a group, and little beside a model's activations."""


def check_group_bytes(group_bytes: int | None) -> None:
    """Raises:
    ValueError: for less than one byte.
    """
    if group_bytes is not None and group_bytes < 1:
        raise ValueError(f"group_bytes must be positive, got {group_bytes:,}")


class SavedInGroup(NamedTuple):
    """What autograd keeps for a saved tensor: its handle, and the group whose backward begins when it is unpacked."""

    packed: PackedTensor
    group: TensorGroup | None  # None: saved outside of all groups
    chunk: ChunkOffloadHandler

    def unpack(self) -> torch.Tensor:
        """The saved tensor; where a backward runs, that of the group begins, unless it has begun.

        Raises:
            CopyError: if a copy has failed.
            RuntimeError: if the tensor was modified in place since it was saved, as autograd itself would.
        """
        if self.group is not None and is_in_backward() and self.chunk.current_group != self.group.index:
            self.chunk.on_group_commit_backward(self.group)
        return self.chunk.tensor_pop(self.packed)


class AutomaticGroups:
    """Groups that open with the first saved tensor and close as soon as their bytes are enough.

    The backward of a group begins when one of its tensors is unpacked. Unpacking in another order than the reverse of
    saving costs time and nothing else.

    The last group of a forward stays open: if its backward comes next it stays on the device, and if another forward
    comes first it leaves then.

    Args:
        session: whose forwards these are. The chunk of a forward starts with its first saved tensor, unless
            `Session.start_forward` was called before.
        group_bytes: a group that has saved so many bytes, each storage once, is closed before the next storage; None:
            by `close_group` only.
    """

    def __init__(self, session: Session, group_bytes: int | None) -> None:
        check_group_bytes(group_bytes)
        self.session: Session = session
        self.group_bytes: int | None = group_bytes
        self._chunk: ChunkOffloadHandler | None = None  # of the last tensor packed

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Context manager: what autograd saves inside it goes into groups."""
        return torch.autograd.graph.saved_tensors_hooks(untraced(self.pack), untraced(self.unpack))

    def pack(self, tensor: torch.Tensor) -> SavedInGroup | StayingTensor:
        """Take charge of a saved tensor; returns what autograd is to keep.

        Raises:
            CopyError: if the copy-out of an earlier group has failed.
        """
        if is_in_backward():
            return StayingTensor(without_graph(tensor))
        try:
            return self._pack(tensor)
        except CopyError:
            self.abandon_forward()
            raise

    def unpack(self, saved: SavedInGroup | StayingTensor) -> torch.Tensor:
        """The tensor that `pack` was given; raises as `SavedInGroup.unpack`."""
        if is_in_backward():
            self.session.note_backward()
            if self._chunk is not None:
                self._turn_around(self._chunk)
        return saved.unpack()

    def close_group(self) -> None:
        """The group ends here, and its copy-out is issued; no-op where none is open."""
        chunk = self._chunk
        if chunk is None or chunk.innermost_group is None:
            return
        if chunk.innermost_group.storages and not self.session.engine.has_failed:
            chunk.close_group()
        else:  # of a graph that was dropped, or cannot be used any more
            chunk.abandon_group()

    def end_forward(self) -> None:
        """The forward is over; the next saved tensor begins another."""
        self.session.end_forward()

    def abandon_forward(self) -> None:
        """The forward raised."""
        self.session.abandon_forward()
        self._chunk = None

    def _pack(self, tensor: torch.Tensor) -> SavedInGroup | StayingTensor:
        chunk = self.session.chunk
        if chunk is None or chunk is not self._chunk:
            self.close_group()  # of the forward before: its backward does not come next
            chunk = self._chunk = chunk or self.session.start_saving()
        group = chunk.innermost_group
        if group is not None and self._is_full(group) and chunk.hooks.would_start_storage(tensor):
            chunk.close_group()  # no earlier than now: this one is not the last, which may have to stay
            group = None
        if group is None:
            group = chunk.open_group("saved tensors")
        packed = chunk.hooks.pack_plain(tensor, group)
        return SavedInGroup(packed, group, chunk) if isinstance(packed, PackedTensor) else packed

    def _is_full(self, group: TensorGroup) -> bool:
        return self.group_bytes is not None and group.own_bytes >= self.group_bytes

    def _turn_around(self, chunk: ChunkOffloadHandler) -> None:
        """A backward begins, so the forward of `chunk` is over, whether or not we were told."""
        if chunk.innermost_group is not None:
            chunk.close_group(keep=True)
        self._chunk = None
        self.end_forward()
