# SPDX-License-Identifier: Apache-2.0
"""Saved storages, and the groups in which they move."""

from __future__ import annotations

import enum
import sys
from typing import Any, Final

import torch

from offload_engine._compat import reads, torch_private
from offload_engine._compat.tensor_reads import Reads
from offload_engine._devices.base import Event, Stream
from offload_engine._devices.regions import HostRegion, TensorSpec
from offload_engine._devices.regions import TensorSpec as Place
from offload_engine._host.leases import GroupLease
from offload_engine._saved.places import covers, overlaps
from offload_engine.schedule import ChunkKey
from offload_engine.traits import GroupTraits


class Residency(enum.Enum):
    """Where the bytes of a storage are.

    Attributes:
        following: the residencies that a storage may have next.
    """

    RESIDENT = "resident"
    """On the device only: just saved, kept, recalled before its release, or copied in and used."""
    COPYING_OUT = "copying out"
    """Still whole on the device, with a copy-out issued."""
    ON_HOST = "on host"
    """On the host; the store has no device buffer."""
    COPYING_IN = "copying in"
    """A copy-in is issued; the compute stream has not waited for it."""
    RETIRED = "retired"
    """Without handles; the bytes are released."""

    following: tuple[Residency, ...]


# Constants, because in the compiled core a constant costs nothing and a member of an enum is an attribute lookup.
RESIDENT: Final = Residency.RESIDENT
COPYING_OUT: Final = Residency.COPYING_OUT
ON_HOST: Final = Residency.ON_HOST
COPYING_IN: Final = Residency.COPYING_IN
RETIRED: Final = Residency.RETIRED

# The table of legal transitions. (Not a dictionary, because hashing an enum member is a Python call.)
RESIDENT.following = (COPYING_OUT, ON_HOST, RETIRED)  # ON_HOST: its buffer was handed over to a tensor read once
COPYING_OUT.following = (ON_HOST, RESIDENT, RETIRED)  # RESIDENT: recalled
ON_HOST.following = (COPYING_IN, COPYING_OUT, RETIRED)  # COPYING_OUT: an outside reference still has the bytes
COPYING_IN.following = (RESIDENT, RETIRED)
RETIRED.following = ()

NEW_VIEW: Final = 1
"""Version of a tensor that `PackedTensor.view` has just made: `set_` counts as a write."""

_is_unmodified: Final[Any] = reads.is_unmodified
_free_weak_ref: Final[Any] = torch_private.free_weak_ref
_sequence_nr: Final[Any] = torch_private.next_sequence_nr
_storage_use_count: Final[Any] = torch_private.use_count


def move(storages: list[SavedStorage], to: Residency) -> None:
    """Change the residency of storages and the byte counters of their groups. No other function changes either.

    Raises:
        AssertionError: if `Residency.following` does not list the transition; names the storage.
    """
    # Storages that move together nearly always share group and residency, so they are counted together.
    group: TensorGroup | None = None
    before, nbytes = to, 0
    for saved in storages:
        if saved.group is not group or saved.residency is not before:
            if group is not None:
                group.count(before, to, nbytes)
            group, before, nbytes = saved.group, saved.residency, 0
            for legal in before.following:  # in line: `in` would compare, where identity will do
                if legal is to:
                    break
            else:
                expected = ", ".join(legal.value for legal in before.following) or "nothing"
                raise AssertionError(f"{saved!r}: cannot go from {before.value} to {to.value}; expected {expected}")
        saved.residency = to
        nbytes += saved.nbytes
        if saved.is_recalled:
            saved.is_recalled = False
            group.recalled_bytes -= saved.nbytes
        elif to is RESIDENT and before is COPYING_OUT:
            saved.is_recalled = True
            group.recalled_bytes += saved.nbytes
        for sharer in saved.sharers:
            sharer.count_shared(before, to, saved.nbytes)
    if group is not None:
        group.count(before, to, nbytes)


class SavedStorage:
    """One storage that autograd needs again: the unit that is copied once, however many tensors and groups saved it.

    `buffer` is a detached alias of the saved tensor, or the target of a copy-in. It keeps the storage alive, but no
    autograd graph. `storage` is the Python object of a saved tensor's storage, kept because it is slow to make.
    """

    __slots__ = (
        "key",
        "has_address",
        "version",
        "nbytes",
        "spec",
        "residency",
        "buffer",
        "metered",
        "storage",
        "stream",
        "readers",
        "pending",
        "copied_out",
        "copied_in",
        "ready_on",
        "lease",
        "region",
        "handles",
        "aliases",
        "is_as_saved",
        "arrived_version",
        "views",
        "group",
        "sharers",
        "is_leaving",
        "is_recalled",
        "num_external_refs",
        "emptied",
        "alloc_stream",
        "last_read",
        "pin",
    )

    def __init__(self, tensor: torch.Tensor, found: Reads, group: TensorGroup, stream: Stream) -> None:
        self.key: object = found[1]  # an int, but one that compiled code need not convert for each look-up
        self.has_address: bool = True  # can be found by its key, unless another storage was saved under the key since
        self.version: int = found[4]
        self.nbytes: int = found[2]
        self.spec: TensorSpec | None = None  # of the first tensor saved and of `buffer`; only if it covers all bytes
        self.residency: Residency = RESIDENT
        self.buffer: torch.Tensor | None = tensor.detach()  # shares the version counter of what autograd saved
        self.metered: int = 0  # the key of `buffer` on a meter: a backward may give the tensor another storage
        self.storage: torch.UntypedStorage | None = found[0]  # of `buffer`, unless that was copied in
        self.stream: Stream = stream  # where it was saved: the compute stream whose memory pool owns the bytes
        self.readers: tuple[Stream, ...] = ()  # other compute streams that read a copied-in buffer
        self.pending: Event | None = None  # last copy touching `buffer`, until `stream` has waited for it
        self.copied_out: Event | None = None
        self.copied_in: Event | None = None
        self.ready_on: Stream = None  # the stream that waited for `copied_in` last
        self.lease: GroupLease | None = None
        self.region: HostRegion | None = None  # its part of the lease
        self.handles: dict[int, Place] = {}  # those that autograd holds, by their `id`
        # Like `buffer`, for the handles of all tensors but the first, which may have version counters of their own.
        self.aliases: dict[int, torch.Tensor] | None = None
        self.is_as_saved: bool = True  # until it is copied in, `buffer` has the form of the first tensor saved
        self.arrived_version: int = 0  # version of a copied-in buffer before its first reader
        # Tensors unpacked over parts of a copied-in buffer. Their version counters show writes into these parts.
        self.views: list[tuple[Place, torch.Tensor]] | None = None
        self.group: TensorGroup = group  # the first group that saved it, which copies it out; or the ungrouped one
        self.sharers: tuple[TensorGroup, ...] = ()  # other groups that saved it
        self.is_leaving: bool = False  # its copy-out is issued or delayed, and may miss later writes
        self.is_recalled: bool = False  # its copy-out was issued, but the buffer was not released
        self.num_external_refs: int | None = None  # outside references not read before backward; None: none declared
        self.emptied: torch.UntypedStorage | None = None  # their storage, resized to zero while its bytes are on host
        self.alloc_stream: Stream = None  # another stream, whose pool may own the bytes
        self.last_read: Event | None = None  # by outside references, if `stream` or `alloc_stream` may lag behind it
        self.pin: Any = None  # torch's weak reference to the storage at `key`

    def pin_address(self) -> bool:
        """Prevent reuse of the address `key` after the buffer is released, without keeping the bytes alive.

        Returns:
            False, without effect, if no tensor is left that could be saved under this address again.
        """
        assert self.storage is not None
        if self._num_tensors() == 1 + self.num_aliases():
            return False
        if self.pin is None:
            self.pin = self.storage._weak_ref()
        return True

    def unpin_address(self) -> None:
        """Undo `pin_address`. Idempotent.

        No destructor does it: Python would ignore an interrupt there, and no handle would be left to be missed.
        """
        pin, self.pin = self.pin, None  # before it is freed: twice would free the pin of another storage
        if pin is not None:
            _free_weak_ref(pin)

    def watch(self, tensor: torch.Tensor, handle: int) -> None:
        """Watch the version counter of a tensor saved by a later handle, while `buffer` has its bytes."""
        if self.buffer is not None and self.copied_in is None:
            if self.aliases is None:
                self.aliases = {}
            self.aliases[handle] = tensor.detach()

    def num_aliases(self) -> int:
        """Return the number of tensors besides `buffer` that this storage keeps over its bytes."""
        return 0 if self.aliases is None else len(self.aliases)

    def forget_handle(self, handle: int) -> None:
        """Forget a handle that autograd has dropped. Idempotent."""
        if handle in self.handles:  # looked up and deleted: `pop` takes twice as long
            del self.handles[handle]
        if self.aliases is not None:
            self.aliases.pop(handle, None)

    def has_lost_handles(self) -> bool:
        """Return whether a registered handle no longer exists, or none is left. Call it while nothing is packed.

        Each handle refers to `handles` until it is freed, which is after its destructor.
        """
        num_left = sys.getrefcount(self.handles) - 2  # that of this storage, and the argument
        return num_left < len(self.handles) or not num_left

    def has_bytes_at(self, place: Place) -> bool:
        """Return whether the bytes at `place` in this storage are sure to be unchanged since they were saved.

        They are if a handle needs them. All others may be written at any time, and the version counter need not show
        it: a part has its own, and kernels outside torch and `Tensor.data` do not count.
        """
        return any([covers(saved, place) for saved in list(self.handles.values())])

    def is_modified(self) -> bool:
        """Return whether any of the saved bytes were written in place, or discarded, since they were saved."""
        if self.aliases is not None:
            if any([alias._version != self.version for alias in list(self.aliases.values())]):
                return True
        return self.unmodified(0) is None

    def unmodified(self, handle: int) -> torch.Tensor | None:
        """Return an alias of the tensor that a handle stands for, with the same version counter.

        Returns:
            The alias; None if the bytes that the handle needs were written in place, or discarded, since they were
            saved.
        """
        assert self.buffer is not None and self.storage is not None
        alias = self.buffer if self.aliases is None else self.aliases.get(handle, self.buffer)
        return alias if _is_unmodified(alias, self.version, self.storage, self.nbytes) else None

    def is_overwritten(self, place: Place) -> bool:
        """Return whether a tensor unpacked from the copied-in buffer has been written in place over bytes at `place`.

        Each tensor over a part has a version counter of its own: the saved parts may have had their own, and a write
        into one of them does not modify another.
        """
        assert self.buffer is not None
        if self.buffer._version != self.arrived_version:
            return True
        if self.views is not None:
            for written, view in self.views:
                if view._version > NEW_VIEW and (written is place or overlaps(written, place)):
                    return True
        return False

    def may_be_emptied(self) -> bool:
        """Return whether the storage is held only by `buffer` and the `num_external_refs` declared tensors."""
        assert self.storage is not None and self.num_external_refs is not None
        num_known = 1 + self.num_aliases() + self.num_external_refs
        return self.storage.resizable() and self._num_tensors() <= num_known

    def may_be_handed_over(self) -> bool:
        """Return whether `buffer` is needed only by the tensor of one handle, on `stream`."""
        return (
            len(self.handles) == 1 and self.num_external_refs is None and not self.readers and self.alloc_stream is None
        )

    def is_still_held(self) -> bool:
        """Return whether an outside reference to the emptied storage is left."""
        return self.emptied is not None and self._num_tensors() > 0

    def _num_tensors(self) -> int:
        """Count the tensors over the storage: aliases and views, in Python, C++ and graphs, each once."""
        assert self.storage is not None or self.emptied is not None
        num_tensors: int = _storage_use_count(self.key) - 1  # minus `storage` or `emptied`, which is one object
        return num_tensors

    def __repr__(self) -> str:
        return f"<SavedStorage {self.nbytes:,} bytes {self.residency.value} of {self.group}>"


class TensorGroup:
    """Tensors saved by one call of one bracketed submodule, or by a chunk outside its groups (`is_ungrouped`).

    `move` maintains the byte counters, so policies read numbers and do not iterate over storages. A group's own
    storages are those that it was the first to save.

    Attributes:
        nbytes: bytes of all its storages.
        own_bytes: bytes of its own storages.
        foreign_bytes: bytes of the others that were first saved outside this group's layer.
        on_host_bytes: bytes on host now.
        leaving_bytes: bytes on the device whose copy-out is issued.
        arriving_bytes: own bytes whose copy-in is issued and not awaited.
        recalled_bytes: own bytes recalled before their release.
        own_device_bytes: own bytes with a buffer on the device.
    """

    __slots__ = (
        "chunk",
        "index",
        "name",
        "layer",
        "part",
        "is_kept",
        "stays",
        "is_read_once",
        "may_delay",
        "min_bytes",
        "ends_layer",
        "is_ungrouped",
        "storages",
        "nbytes",
        "own_bytes",
        "foreign_bytes",
        "on_host_bytes",
        "leaving_bytes",
        "arriving_bytes",
        "recalled_bytes",
        "own_device_bytes",
        "_first_sequence_nr",
    )

    def __init__(
        self, chunk: ChunkKey, index: int, name: str, traits: GroupTraits | None = None, is_ungrouped: bool = False
    ) -> None:
        self.chunk = chunk
        self.index = index
        self.name = name
        self.layer: int = -1
        self.part: int = 0  # position among the groups of this name in this layer of the chunk
        self.stays: bool = False  # chosen to stay, whatever the policy and the microbatch
        self.is_kept: bool = False  # initially `traits.keep`; changed by the chunk or the executor
        self.is_read_once: bool = False
        self.may_delay: bool = False
        self.min_bytes: int = 0  # smaller storages stay
        if traits is not None:
            self.is_kept, self.layer, self.is_read_once, self.may_delay, self.min_bytes = traits
        self.ends_layer: bool = False  # its commit ends the layer; known when it is closed
        self.is_ungrouped = is_ungrouped  # never copied out: its storages move only with a group that saves them too
        self.storages: dict[SavedStorage, None] = {}  # in the order of saving; removed when they retire
        self.nbytes = 0
        self.own_bytes = 0
        self.foreign_bytes = 0
        self.on_host_bytes = 0
        self.leaving_bytes = 0
        self.arriving_bytes = 0
        self.recalled_bytes = 0
        self.own_device_bytes = 0
        self._first_sequence_nr: int = _sequence_nr()

    def add(self, saved: SavedStorage) -> None:
        """Record that this group saved `saved`. Idempotent."""
        if saved in self.storages:
            return
        self.storages[saved] = None
        nbytes = saved.nbytes
        self.nbytes += nbytes
        if saved.group is self:  # just saved: resident
            self.own_bytes += nbytes
            self.own_device_bytes += nbytes
            return
        if not any(other.is_of_layer(self) for other in (saved.group, *saved.sharers)):
            self.foreign_bytes += nbytes
        saved.sharers = (*saved.sharers, self)
        if saved.residency is ON_HOST:
            self.on_host_bytes += nbytes
        elif saved.residency is COPYING_OUT:
            self.leaving_bytes += nbytes

    def is_of_layer(self, other: TensorGroup) -> bool:
        """Return whether both groups belong to one layer of one chunk."""
        return self.layer == other.layer and self.chunk == other.chunk and not self.is_ungrouped

    def count(self, before: Residency, to: Residency, nbytes: int) -> None:
        """Count own storages that moved together. Called by `move`."""
        if before is RESIDENT:
            if to is COPYING_OUT:
                self.leaving_bytes += nbytes
                return
        elif before is COPYING_IN:
            self.arriving_bytes -= nbytes
        elif before is COPYING_OUT:
            self.leaving_bytes -= nbytes
        else:
            self.on_host_bytes -= nbytes
            if to is not RETIRED:
                self.own_device_bytes += nbytes
            if to is COPYING_IN:
                self.arriving_bytes += nbytes
            elif to is COPYING_OUT:
                self.leaving_bytes += nbytes
            return
        if to is ON_HOST:
            self.on_host_bytes += nbytes
        if to is not RESIDENT:  # on host or retired
            self.own_device_bytes -= nbytes

    def count_shared(self, before: Residency, to: Residency, nbytes: int) -> None:
        """Count a storage of another group that moved. Called by `move`."""
        if before is ON_HOST:
            self.on_host_bytes -= nbytes
        elif before is COPYING_OUT:
            self.leaving_bytes -= nbytes
        if to is ON_HOST:
            self.on_host_bytes += nbytes
        elif to is COPYING_OUT:
            self.leaving_bytes += nbytes

    def has_made(self, node: torch.autograd.graph.Node) -> bool:
        """Return whether `node` was created after the group was opened, in the same thread."""
        number: int = node._sequence_nr()
        return number >= self._first_sequence_nr

    def __repr__(self) -> str:
        stage, microbatch = self.chunk
        group = "no group" if self.is_ungrouped else f"group {self.index} ({self.name})"
        return f"{group} of chunk (stage {stage}, microbatch {microbatch})"
