# SPDX-License-Identifier: Apache-2.0
"""`AutomaticGroups`: forms groups by size, without marks in the model or in its graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from offload_engine._compat.own_hooks import OwnHooks, innermost_is, pop_own
from offload_engine._saved.handles import PackedTensor, StayingTensor, without_graph
from offload_engine._saved.quantized import PLAIN_TYPES, taken_apart
from offload_engine._saved.storage import TensorGroup
from offload_engine.chunk import ChunkOffloadHandler
from offload_engine.config import MIB
from offload_engine.errors import CopyError
from offload_engine.frontends._common.compiling import untraced
from offload_engine.frontends._common.session import Session, is_in_backward
from offload_engine.traits import GroupTraits

_ANY = "saved tensors"
GROUP_BYTES = 32 * MIB
"""Copied in 0.6 ms at 55 GB/s: many times the host cost of a group, and little compared to a model's activations."""


def check_group_bytes(group_bytes: int | None) -> None:
    """Check a group size.

    Raises:
        ValueError: if it is less than one byte.
    """
    if group_bytes is not None and group_bytes < 1:
        raise ValueError(f"group_bytes must be positive, got {group_bytes:,}")


class SavedInGroup(NamedTuple):
    """Kept by autograd for a saved tensor: its handle, and the group whose backward begins when it is unpacked."""

    packed: PackedTensor
    group: TensorGroup | None  # None: saved outside all groups
    chunk: ChunkOffloadHandler

    def unpack(self) -> torch.Tensor:
        """Return the saved tensor; in a backward, begin the backward of its group first, unless it has begun.

        Raises:
            CopyError: if a copy has failed.
            RuntimeError: as autograd itself, if the tensor was modified in place since it was saved.
        """
        return unpack_in_group(self.packed, self.group, self.chunk)


def unpack_in_group(packed: PackedTensor, group: TensorGroup | None, chunk: ChunkOffloadHandler) -> torch.Tensor:
    """Return the tensor that `packed` stands for; see `SavedInGroup.unpack`."""
    if group is not None and is_in_backward() and chunk.boundaries.current_group != group.index:
        chunk.on_group_commit_backward(group)
    return chunk.tensor_pop(packed)


class AutomaticGroups:
    """Opens a group with the first saved tensor and closes it when it has enough bytes.

    The backward of a group begins when one of its tensors is unpacked. To unpack in an order other than the reverse of
    saving only costs time.

    The last group of a forward stays open: it stays on the device if its backward comes next, and is copied out if
    another forward comes first.

    Args:
        session: turns forwards into chunks. The chunk of a forward starts with its first saved tensor, unless
            `Session.start_forward` was called before.
        group_bytes: a group that has saved this many bytes, each storage once, is closed before the next storage; None:
            only `close_group` closes groups.
    """

    def __init__(self, session: Session, group_bytes: int | None) -> None:
        check_group_bytes(group_bytes)
        self.session: Session = session
        self.group_bytes: int | None = group_bytes
        self.num_forwards: int = 0  # whose chunks were started here
        self._chunk: ChunkOffloadHandler | None = None  # of the last tensor packed
        self._name, self._traits = _ANY, GroupTraits()  # of groups that open

    def hooks(self) -> OwnHooks:
        """Return a context manager: tensors that autograd saves inside it go into groups.

        Call it outside the last one: hooks that an interrupt has left of that one are popped.
        """
        self.pop_leftover()
        self.name_groups()
        return OwnHooks(untraced(self.pack), untraced(self.unpack))

    @property
    def are_innermost(self) -> bool:
        """Return whether tensors that autograd saves now come here first."""
        return innermost_is(self._is_own)

    def name_groups(self, name: str = _ANY, traits: GroupTraits | None = None) -> None:
        """Close the open group; give those that follow a name, and traits, until the next call."""
        if name != self._name or traits != self._traits:
            self.close_group()
            self._name, self._traits = name, traits or GroupTraits()

    def start_forward(self) -> None:
        """Start the chunk of a forward now, unless it has been started: otherwise its first saved tensor does."""
        if self.session.chunk is None:
            self.session.start_saving()
            self.num_forwards += 1

    def pop_leftover(self) -> None:
        """Pop hooks that an interrupt has left on the stack. Call it while none are entered."""
        pop_own(self._is_own)

    def _is_own(self, unpack: Callable[[Any], torch.Tensor]) -> bool:
        return inspect.unwrap(unpack) == self.unpack

    def pack(self, tensor: torch.Tensor) -> SavedInGroup | StayingTensor:
        """Pack a saved tensor; return what autograd keeps.

        Raises:
            CopyError: if the copy-out of an earlier group has failed.
        """
        if is_in_backward():
            return StayingTensor(without_graph(tensor))
        if type(tensor) not in PLAIN_TYPES and (parts := taken_apart(tensor, self.pack, self.unpack)) is not None:
            return parts
        try:
            return self._pack(tensor)
        except CopyError:
            self.abandon_forward()
            raise

    def unpack(self, saved: SavedInGroup | StayingTensor) -> torch.Tensor:
        """Return the tensor that `pack` was given; raises as `SavedInGroup.unpack`."""
        if is_in_backward():
            self.session.note_backward(saved.chunk if isinstance(saved, SavedInGroup) else None)
            if self._chunk is not None:
                self._turn_around(self._chunk)
        return saved.unpack()

    def close_group(self) -> None:
        """Close the open group and issue its copy-out. No-op if none is open."""
        chunk = self._chunk
        if chunk is None or chunk.groups.innermost is None:
            return
        if chunk.groups.innermost.storages and not self.session.engine.failures.has_failed:
            chunk.close_group()
        else:  # its graph was dropped, or cannot run backward because a copy failed
            chunk.abandon_group()

    def end_forward(self) -> None:
        """End a forward; the next saved tensor starts another one."""
        self.session.end_forward()

    def abandon_forward(self) -> None:
        """Abandon the open groups of a forward that raised."""
        self.session.abandon_forward()
        self._chunk = None

    def _pack(self, tensor: torch.Tensor) -> SavedInGroup | StayingTensor:
        chunk = self.session.chunk
        if chunk is None or chunk is not self._chunk:
            self.close_group()  # of the previous forward, whose backward does not come next
            self.start_forward()
            chunk = self._chunk = self.session.chunk
            assert chunk is not None
        group = chunk.groups.innermost
        if group is not None and self._is_full(group) and chunk.hooks.would_start_storage(tensor):
            chunk.close_group()  # only now is it known that this is not the last group, which stays
            group = None
        if group is None:
            group = chunk.open_group(self._name, self._traits)
        packed = chunk.hooks.pack_plain(tensor, group)
        return SavedInGroup(packed, group, chunk) if isinstance(packed, PackedTensor) else packed

    def _is_full(self, group: TensorGroup) -> bool:
        return self.group_bytes is not None and group.own_bytes >= self.group_bytes

    def _turn_around(self, chunk: ChunkOffloadHandler) -> None:
        """End the forward of `chunk`, because a backward runs: `end_forward` may not have been called."""
        if chunk.groups.innermost is not None:
            chunk.close_group(keep=True)
        self._chunk = None
        self.end_forward()
