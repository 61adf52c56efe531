# SPDX-License-Identifier: Apache-2.0
"""Keeps what a captured forward has saved: storages, and the handles that autograd keeps instead of tensors."""

from __future__ import annotations

import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload_engine._compat import torch_private
from offload_engine._compat.tensor_reads import Reads
from offload_engine._devices.regions import HostRegion
from offload_engine._devices.regions import TensorSpec as Place
from offload_engine._saved.places import overlaps
from offload_engine._saved.storage import NEW_VIEW


class CapturedTensor:
    """Stands for one saved tensor inside autograd. Owned by autograd.

    Attributes:
        saved: its storage.
        place: its bytes in the storage.
        tensor: an alias of the tensor, with its version counter; None: its bytes have left.
        original: the identity of the tensor.
    """

    __slots__ = ("saved", "place", "tensor", "original", "_version", "__weakref__")

    def __init__(self, tensor: torch.Tensor, found: Reads, saved: CapturedStorage) -> None:
        self.saved: CapturedStorage = saved
        self.place: Place = found[5]
        self.tensor: torch.Tensor | None = tensor.detach()
        self.original: int = id(tensor)
        self._version: int = found[4]
        saved.add(self)

    def hold(self, storage: torch.UntypedStorage) -> None:
        """Hold the bytes of `storage` again."""
        self.tensor = _view(storage, self.place)
        self._version = self.tensor._version

    @property
    def is_modified(self) -> bool:
        """Return whether the tensor has been written in place since it was saved."""
        return self.tensor is not None and self.tensor._version != self._version


class BroughtBack:
    """Makes tensors over a storage that has left, at the address from which one capture reads it.

    Args:
        storage: at that address.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        self._views: list[tuple[Place, torch.Tensor]] = []

    def view(self, place: Place) -> torch.Tensor:
        """Return a tensor over the bytes at a place."""
        view = _view(self._storage, place)
        self._views.append((place, view))
        return view

    def is_overwritten(self, place: Place) -> bool:
        """Return whether a tensor that `view` returned was written in place over bytes at `place`."""
        return any(view._version > NEW_VIEW and overlaps(written, place) for written, view in self._views)


class CapturedStorage:
    """A storage that a captured forward has saved.

    Attributes:
        number: number of the capture.
        key: its identity, while it exists.
        address: its device address in each replay.
        nbytes: its size.
        is_grouped: a group has saved it, so it may leave.
        region: its bytes on host; None: it has not left.
        offset: offset of these from the first host byte of all storages that left with it.
    """

    def __init__(self, number: int, found: Reads) -> None:
        self.number: int = number
        self.address: int = found[3]
        self.nbytes: int = found[2]
        self.is_grouped: bool = False
        self.region: HostRegion | None = None
        self.offset: int = 0
        self.key: int = found[1]
        self._handles: list[weakref.ref[CapturedTensor]] = []

    def add(self, handle: CapturedTensor) -> None:
        """Add a handle over this storage."""
        self._handles.append(weakref.ref(handle))

    @property
    def handles(self) -> list[CapturedTensor]:
        """Return the handles whose backward has not been captured yet."""
        return [handle for ref in self._handles if (handle := ref()) is not None]

    def may_leave(self) -> bool:
        """Return whether a group has saved the bytes, a backward reads them unmodified, and nothing else holds them."""
        handles = self.handles
        if not (self.is_grouped and handles) or any(handle.is_modified for handle in handles):
            return False
        # Each alias also holds its original, for forward-mode derivatives.
        ours = len(handles) + len({handle.original for handle in handles})
        return torch_private.use_count(self.key) <= ours  # more if a static output, for instance, holds the storage

    def release(self, region: HostRegion, offset: int) -> bool:
        """Release the bytes, so that later captures use them again; return whether that was possible.

        If other code holds an original, the handles hold the bytes again, and the storage stays.
        """
        handles = self.handles
        tensors = [handle.tensor for handle in handles if handle.tensor is not None]
        if not tensors:  # its graph was freed in the meantime
            return False
        weak = StorageWeakRef(tensors[0].untyped_storage())
        tensors.clear()
        for handle in handles:
            handle.tensor = None
        if weak.expired():
            self.region, self.offset = region, offset
            return True
        storage = torch_private.storage_of(weak.cdata)
        for handle in handles:
            handle.hold(storage)
        self.is_grouped = False
        return False


def _view(storage: torch.UntypedStorage, place: Place) -> torch.Tensor:
    offset, shape, stride, dtype = place
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)
