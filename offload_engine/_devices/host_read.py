"""Small reads of device tensors by the host, past the copy engine.

The copy engine serves all streams first in, first out: behind half a gigabyte of copy-out, `.item()` of one number
takes 9 ms, and neither stream priorities nor smaller pieces help. A kernel that stores into mapped pinned memory does
not use that engine at all.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch

from .base import Event, HostRead, PlainRead
from .cuda_runtime import CudaRuntime
from .pinned import PinnedSlab

SLOT_BYTES = 8192
_NUM_SLOTS = 512
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
        """Block the host until the kernel has run; a spin, because sleeping would cost more than the read."""
        while not self._runtime.is_complete(self._event):
            pass
        return self.tensor


class _Slot(ctypes.c_byte * SLOT_BYTES):  # type: ignore[misc]
    """Memory of one read. The CPU tensor made from it holds it, whatever views of it there are, and then frees it."""

    release: Any

    def __del__(self) -> None:
        release = getattr(self, "release", None)
        if release is not None:
            release()


class MappedReader:
    """Owns a slab of mapped pinned memory, cut into slots that are lent to reads.

    Args:
        device: whose tensors are read.
        runtime: CUDA calls on that device.

    Raises:
        MemoryError: if the memory cannot be pinned.
    """

    def __init__(self, device: torch.device, runtime: CudaRuntime) -> None:
        self._device = device
        self._runtime = runtime
        self._slab = PinnedSlab(SLOT_BYTES * _NUM_SLOTS)
        mapped = torch.as_tensor(_CudaView(self._slab.address, self._slab.nbytes), device=device)
        self._mapped = {size: mapped.view(bits) for size, bits in _BITS.items()}  # made once: a view takes microseconds
        self._free: list[tuple[int, Event | None]] = [(slot, None) for slot in range(_NUM_SLOTS)]

    def read(self, tensor: torch.Tensor) -> HostRead:
        """Start reading `tensor`, behind the work of the current stream; large or many reads go the plain way."""
        size = tensor.element_size()
        mapped = self._mapped.get(size)
        slot = self._take() if 0 < tensor.numel() * size <= SLOT_BYTES and mapped is not None else None
        if slot is None or mapped is None:
            return PlainRead(tensor)
        target = mapped.as_strided(tensor.shape, _contiguous(tensor.shape), slot * SLOT_BYTES // size)
        source = tensor if tensor.dtype is mapped.dtype else tensor.detach().view(mapped.dtype)
        torch.bitwise_or(source, 0, out=target)
        event = self._runtime.record(torch._C._cuda_getCurrentRawStream(self._device.index))
        return MappedRead(self._host_tensor(slot, event, tensor), event, self._runtime)

    def _take(self) -> int | None:
        """A free slot that no kernel of an abandoned read still writes to."""
        for position, (slot, written) in enumerate(self._free):
            if written is None or self._runtime.is_complete(written):
                del self._free[position]
                return slot
        return None

    def _host_tensor(self, slot: int, event: Event, like: torch.Tensor) -> torch.Tensor:
        memory = _Slot.from_address(self._slab.address + slot * SLOT_BYTES)
        free, slab = self._free, self._slab  # the slab lives as long as any tensor over it

        def release() -> None:
            free.append((slot, event))
            assert slab is not None

        memory.release = release
        return torch.frombuffer(memory, dtype=like.dtype, count=math.prod(like.shape)).view(like.shape)


def _contiguous(shape: torch.Size) -> list[int]:
    """The strides of a contiguous tensor."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 1, 0, -1):
        strides[i - 1] = strides[i] * shape[i]
    return strides


class _CudaView:
    """Host memory as CUDA sees it: mapped, under the same address."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
