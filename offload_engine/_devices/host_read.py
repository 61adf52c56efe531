# SPDX-License-Identifier: Apache-2.0
"""Reads small device tensors on the host, bypassing the copy engine.

The copy engine serves all streams first in, first out: behind half a gigabyte of copy-out, `.item()` of one number
takes 9 ms, and neither stream priorities nor smaller pieces help. A kernel that stores into mapped pinned memory does
not use that engine at all.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections import deque
from functools import partial

import torch

from offload_engine._compat import torch_private
from offload_engine._devices.base import Event, HostRead, PlainRead
from offload_engine._devices.cuda_runtime import CudaRuntime
from offload_engine._devices.pinned import PinnedSlab

logger = logging.getLogger(__name__)

SLOT_BYTES = 8192
_NUM_SLOTS = 512
_MAX_TARGETS = 8  # per slot
# Bits are stored as integers of the same size: arithmetic would change negative zeros and NaNs.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class MappedRead:
    """A read by a kernel that stores into mapped memory."""

    __slots__ = ("tensor", "_event", "_runtime")

    def __init__(self, tensor: torch.Tensor, event: Event, runtime: CudaRuntime) -> None:
        self.tensor = tensor
        self._event = event
        self._runtime = runtime

    def wait(self) -> torch.Tensor:
        """Block the host until the kernel has run.

        Raises:
            CopyError: if it failed, or earlier work did.
        """
        # A sleep would take longer than the read. Compiled, this loop would keep all other threads from running.
        event, poll = self._event, self._runtime.poll
        while not poll(event):
            pass
        return self.tensor


class _Slot:
    """One part of the slab, with targets that are cached because a training loop reads few shapes."""

    __slots__ = ("address", "offset", "slab", "written", "targets")

    def __init__(self, slab: PinnedSlab, offset: int) -> None:
        self.address = slab.address + offset
        self.offset = offset
        self.slab = slab  # must live as long as any tensor over it, even without the reader
        self.written: Event | None = None  # after the last kernel that stores into it
        self.targets: dict[tuple[int, torch.Size], torch.Tensor] = {}  # on the device, by element size and shape


class _Lent(ctypes.c_byte * SLOT_BYTES):  # type: ignore[misc]
    """The memory of a slot, lent to one read. Held by the CPU tensor made from it and by all its views."""

    __slots__ = ("slot",)

    slot: _Slot


class _Lease(weakref.ref[_Lent]):
    """Refers to the memory of a slot while it is lent."""

    __slots__ = ("slot",)

    slot: _Slot


class MappedReader:
    """Owns a slab of mapped pinned memory, cut into slots that are lent to reads.

    Any thread may read, and drop results: free slots are exchanged by atomic operations of a deque. The next read may
    overwrite a dropped result. It follows all work of its own stream, but if a result is copied to a device without
    blocking, on another stream, hold it until the copy is over.

    Args:
        device: device of the tensors.
        runtime: CUDA calls on that device.

    Raises:
        MemoryError: if the memory cannot be pinned.
    """

    def __init__(self, device: torch.device, runtime: CudaRuntime) -> None:
        slab = PinnedSlab(SLOT_BYTES * _NUM_SLOTS)
        self._runtime = runtime
        self._current_stream = partial(torch_private.cuda_current_stream, device.index)
        self._mapped: dict[int, torch.Tensor] = {}  # by element size; empty: kernels cannot access the slab
        address = runtime.device_address(slab.address)
        if address is None:
            logger.warning("pinned memory is not mapped for %s: small reads queue behind large copies", device)
        else:
            with torch.inference_mode(False):  # a first read in that mode would make targets read-only
                mapped = _device_view(address, slab.nbytes, device)
                self._mapped = {size: mapped.view(bits) for size, bits in _BITS.items()}
        # The slot returned last is lent first, because its bytes are still in the CPU's caches.
        self._free: deque[_Lease] = deque()  # those that are over
        self._leases: dict[int, _Lease] = {}  # by the offset of their slots
        for offset in range(0, slab.nbytes, SLOT_BYTES):
            self._lend_slot(_Slot(slab, offset))

    def read(self, tensor: torch.Tensor) -> HostRead:
        """Start reading `tensor`, after the work of the current stream; large or many reads use `.cpu()`."""
        size, count = tensor.element_size(), tensor.numel()
        mapped = self._mapped.get(size)
        lent = self._lend() if mapped is not None and 0 < count * size <= SLOT_BYTES else None
        if mapped is None or lent is None:
            return PlainRead(tensor)
        tensor = tensor.resolve_conj().resolve_neg()  # usually the tensor itself
        slot, shape = lent.slot, tensor.shape
        target = slot.targets.get((size, shape))
        if target is None:
            target = _add_target(slot, mapped, size, shape)
        source = tensor if tensor.dtype is target.dtype else tensor.view(target.dtype)
        torch.bitwise_or(source, source, out=target)
        slot.written = event = self._runtime.record(self._current_stream())
        # The rest runs on the host while the kernel runs.
        result = torch.frombuffer(lent, dtype=tensor.dtype, count=count)
        return MappedRead(result if len(shape) == 1 else result.view(shape), event, self._runtime)

    def _lend(self) -> _Lent | None:
        """Lend the memory of a free slot, to which no kernel of a dropped read still writes, until it is dropped."""
        free = self._free
        for _ in range(len(free)):
            try:
                lease = free.pop()
            except IndexError:  # another thread was faster
                return None
            slot = lease.slot
            if slot.written is None or self._runtime.is_complete(slot.written):
                slot.written = None  # so that its handle is reused next
                return self._lend_slot(slot)
            free.appendleft(lease)
        return None

    def _lend_slot(self, slot: _Slot) -> _Lent:
        lent = _Lent.from_address(slot.address)
        lent.slot = slot
        # By a callback that is not in Python: a destructor might lose an interrupt.
        lease = self._leases[slot.offset] = _Lease(lent, self._free.append)
        lease.slot = slot
        return lent


def _add_target(slot: _Slot, mapped: torch.Tensor, size: int, shape: torch.Size) -> torch.Tensor:
    """Make the contiguous tensor of `shape` at the start of `slot`, on the device, and cache it for later reads."""
    if len(slot.targets) == _MAX_TARGETS:  # shapes change from step to step
        slot.targets.clear()
    target = slot.targets[size, shape] = mapped.as_strided(shape, _contiguous(shape), slot.offset // size)
    return target


def _contiguous(shape: torch.Size) -> list[int]:
    """Return the strides of a contiguous tensor."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 1, 0, -1):
        strides[i - 1] = strides[i] * shape[i]
    return strides


def _device_view(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return a tensor on `device` over the bytes at a device address, without owning them."""
    return torch.as_tensor(_CudaView(address, nbytes), device=device)


class _CudaView:
    """Exposes mapped host memory to CUDA."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
