# SPDX-License-Identifier: Apache-2.0
"""Keeps the host tier in plain memory, for machines without a disk and for comparison; saves the process no memory."""

from __future__ import annotations

import ctypes

import torch

from offload_engine._devices.host_memory import check_memory


class MemorySlab:
    """Owns `nbytes` of ordinary memory."""

    def __init__(self, nbytes: int) -> None:
        """Allocate the memory.

        Raises:
            MemoryError: if the machine, or this process's control group, has no room for it.
        """
        check_memory(nbytes, "host tier in plain memory")
        self.nbytes = nbytes
        self._bytes: torch.Tensor | None = torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def __repr__(self) -> str:
        return f"MemorySlab({self.nbytes:,} bytes)"

    # memmove, not Tensor.copy_: both release the GIL, but copy_ would start a pool of OpenMP threads in each
    # worker thread, and they would compete with the model's own.

    def write(self, address: int, offset: int, nbytes: int) -> None:
        """Copy `nbytes` of memory at `address` to `offset`; releases the GIL while it copies."""
        ctypes.memmove(self._address() + offset, address, nbytes)

    def read(self, address: int, offset: int, nbytes: int) -> None:
        """Copy `nbytes` at `offset` to memory at `address`; releases the GIL while it copies."""
        ctypes.memmove(address, self._address() + offset, nbytes)

    def close(self) -> None:
        self._bytes = None

    def _address(self) -> int:
        if self._bytes is None:
            raise OSError("the slab is closed")
        return self._bytes.data_ptr()
