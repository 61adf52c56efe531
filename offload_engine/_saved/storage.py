"""Saved storages and the groups that they move in."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Final

import torch

from offload_engine.schedule import ChunkKey

if TYPE_CHECKING:
    from offload_engine._devices.base import Event, Stream
    from offload_engine._devices.regions import Form, HostRegion
    from offload_engine._host.leases import GroupLease


class Residency(enum.Enum):
    """Where the bytes of a storage are. One transition leads to each member."""

    RESIDENT = "resident"
    """On the device only: just saved, kept by the plan, recalled before its release, or copied in and used."""
    COPYING_OUT = "copying out"
    """Still whole on the device, with a copy-out issued (`ActivationStore.issue_copy_out`)."""
    ON_HOST = "on host"
    """On the host only, as far as the store has it (`ActivationStore.release`, or handed over by `unpack`)."""
    COPYING_IN = "copying in"
    """A copy-in is issued; the compute stream has not waited for it (`ActivationStore.issue_copy_in`)."""
    RETIRED = "retired"
    """No handle is left: the bytes are gone (`ActivationStore.retire`)."""


# The compiled core reads a constant in no time, a member of an enumeration as slowly as any attribute of a class.
RESIDENT: Final = Residency.RESIDENT
COPYING_OUT: Final = Residency.COPYING_OUT
ON_HOST: Final = Residency.ON_HOST
COPYING_IN: Final = Residency.COPYING_IN
RETIRED: Final = Residency.RETIRED

_free_weak_ref: Final[Any] = torch.UntypedStorage._free_weak_ref
_next_node: Final[Any] = torch._C._autograd._get_sequence_nr  # type: ignore[attr-defined]
_storage_use_count: Final[Any] = torch._C._storage_Use_Count  # type: ignore[attr-defined]


class SavedStorage:
    """One storage that autograd needs again: the unit that is copied once, however many tensors and groups saved it.

    `buffer` is a detached alias of the saved tensor, or the bytes of a copy-in: it holds the storage alive and nothing
    else, no autograd graph.
    """

    __slots__ = (
        "key",
        "version",
        "nbytes",
        "form",
        "residency",
        "buffer",
        "stream",
        "readers",
        "pending",
        "copied_out",
        "copied_in",
        "ready_on",
        "lease",
        "region",
        "num_handles",
        "group",
        "is_leaving",
        "num_holders",
        "emptied",
        "home",
        "last_read",
        "_pin",
    )

    def __init__(self, tensor: torch.Tensor, storage: torch.UntypedStorage, group: TensorGroup, stream: Stream) -> None:
        self.key: int = storage._cdata
        self.version: int = tensor._version
        self.nbytes: int = storage.nbytes()
        self.form: Form | None = None  # of `buffer`, if it is that of the first tensor saved, over all of its bytes
        self.residency: Residency = RESIDENT
        self.buffer: torch.Tensor | None = tensor.detach()  # shares the version counter of what autograd saved
        self.stream: Stream = stream  # where it was saved: the compute stream whose memory pool owns the bytes
        self.readers: tuple[Stream, ...] = ()  # other compute streams that read a copied-in buffer
        self.pending: Event | None = None  # last copy touching `buffer`, as long as `stream` has not waited for it
        self.copied_out: Event | None = None
        self.copied_in: Event | None = None
        self.ready_on: Stream = None  # the stream that waited for `copied_in` last
        self.lease: GroupLease | None = None
        self.region: HostRegion | None = None  # its part of the lease
        self.num_handles: int = 0
        self.group: TensorGroup = group  # the first to save it inside a bracket, if any did; that one moves it out
        self.is_leaving: bool = False  # its copy-out is issued, or waits to be: it may lack what is written from now on
        self.num_holders: int | None = None  # tensors that hold it to no end until its backward; None: not known
        self.emptied: torch.UntypedStorage | None = None  # their storage, without bytes while those are on host
        self.home: Stream = None  # another stream, whose pool the bytes may have come from
        self.last_read: Event | None = None  # by the holders, as far as `stream` or `home` may not know of it
        self._pin: _AddressPin | None = None

    def pin_address(self) -> bool:
        """Before the buffer goes: keep the address `key` from being given to another storage, but no byte alive.

        Returns:
            False, and nothing is kept, if no tensor is left that could be saved under this address once more.
        """
        assert self.buffer is not None
        storage = self.buffer.untyped_storage()
        if _num_tensors(storage) == 1:  # `buffer`
            return False
        self._pin = _AddressPin(storage)
        return True

    def may_lack_writes_to(self, tensor: torch.Tensor) -> bool:
        """True if bytes that are leaving may lack what `tensor`, of the same storage and version, has at its save.

        The parts that unsafe_chunk and the like make of a storage each have a version counter of their own, which is
        also that of their views. They may be written in place one by one, each between the saves of others.
        """
        if tensor._version == 0:  # nobody has written to it: a detached part, say
            return False
        base = tensor._base if tensor._is_view() else tensor
        return base is None or base.nbytes != self.nbytes

    def is_modified(self) -> bool:
        """True if the saved bytes were written in place, or discarded, since they were saved."""
        assert self.buffer is not None
        return self.buffer._version != self.version or self.buffer.untyped_storage().nbytes() != self.nbytes

    def may_be_emptied(self) -> bool:
        """True if nobody holds the storage but `buffer` and the `num_holders` tensors that are not read."""
        assert self.buffer is not None and self.num_holders is not None
        storage = self.buffer.untyped_storage()
        return storage.resizable() and _num_tensors(storage) <= 1 + self.num_holders

    def may_be_handed_over(self) -> bool:
        """True if nobody but the tensor of its one handle needs `buffer`, nor any stream but `stream`."""
        return self.num_handles == 1 and self.num_holders is None and not self.readers and self.home is None

    def is_still_held(self) -> bool:
        """True if a tensor is left whose storage was emptied."""
        return self.emptied is not None and _num_tensors(self.emptied) > 0

    def __repr__(self) -> str:
        return f"<SavedStorage {self.nbytes:,} bytes {self.residency.value} of {self.group}>"


class _AddressPin:
    """As torch's `StorageWeakRef`, in a third of the time when compiled: there is one for each released storage."""

    __slots__ = ("_weak", "_free")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._weak: Any = storage._weak_ref()
        self._free = _free_weak_ref  # held here: at the end of the interpreter globals go first

    def __del__(self) -> None:
        self._free(self._weak)


def _num_tensors(storage: torch.UntypedStorage) -> int:
    """How many tensors there are over `storage`: aliases and views, in Python, C++ and graphs, each once."""
    num_tensors: int = _storage_use_count(storage._cdata) - 1  # one is `storage`
    return num_tensors


class TensorGroup:
    """What one call of one bracketed submodule saved, or what a chunk saved outside those (`is_rest`).

    The inputs of a checkpoint are read once (`is_read_once`): its recomputation lets go of them, unless it saves them,
    long before autograd drops their handles. So `ActivationStore.unpack` hands their buffers over and keeps the host
    bytes instead, from which a second backward, of a retained graph, gets them again. For what is dropped right after
    it is read that would only keep host bytes for longer.
    """

    __slots__ = (
        "chunk",
        "index",
        "name",
        "is_kept",
        "is_rest",
        "is_read_once",
        "may_wait",
        "layer",
        "storages",
        "nbytes",
        "own_bytes",
        "_first_node",
    )

    def __init__(self, chunk: ChunkKey, index: int, name: str, is_kept: bool, is_rest: bool = False) -> None:
        self.chunk = chunk
        self.index = index
        self.name = name
        self.is_kept = is_kept  # the plan leaves it resident
        self.is_rest = is_rest  # never copied out: such a storage moves only with a group that saves it too
        self.is_read_once: bool = False  # in each backward, and needed no longer than the tensor that it is read as
        self.may_wait: bool = False  # with its copy-out, until `ChunkOffloadHandler.pass_host_wait`
        self.layer: int = -1  # of its chunk, from 0; -1: nobody has said
        self.storages: dict[SavedStorage, None] = {}  # in the order of saving, each once; its own go as they retire
        self.nbytes = 0
        self.own_bytes = 0  # of what no group saved before
        self._first_node: int = _next_node()

    def add(self, storage: SavedStorage) -> None:
        """Note that this group saved `storage`. Idempotent."""
        if storage not in self.storages:
            self.storages[storage] = None
            self.nbytes += storage.nbytes
            if storage.group is self:
                self.own_bytes += storage.nbytes

    def has_made(self, node: torch.autograd.graph.Node) -> bool:
        """True if `node` came into the graph after the group was opened, in the same thread."""
        number: int = node._sequence_nr()  # type: ignore[attr-defined]
        return number >= self._first_node

    def __repr__(self) -> str:
        stage, microbatch = self.chunk
        group = "no group" if self.is_rest else f"group {self.index} ({self.name})"
        return f"{group} of chunk (stage {stage}, microbatch {microbatch})"
