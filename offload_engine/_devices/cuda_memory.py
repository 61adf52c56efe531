# SPDX-License-Identifier: Apache-2.0
"""`CudaMemory`: measures what this process holds on a GPU, as torch's allocator and the driver count it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from offload_engine._devices.cuda_shortage import CudaShortages
from offload_engine._devices.cuda_trace import start_recording, stop_recording
from offload_engine.planning.allocations import AllocationLog
from offload_engine.sizes import short_size

logger = logging.getLogger(__name__)


class CudaMemory:
    """Measures one GPU; implements `MemoryGauge`.

    Memory outside the allocator belongs to the CUDA context, NCCL, cuBLAS and the like. The driver counts all processes
    on a GPU together: a process that shares its GPU counts the memory of the others as its own.

    Args:
        device: a CUDA device with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shortages = CudaShortages(device.index)

    def peak_bytes(self) -> int:
        """See `MemoryGauge`."""
        return _of(self._stats(), "allocated_bytes", "peak")

    def reset(self) -> None:
        """See `MemoryGauge`."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def held_bytes(self) -> int:
        """See `MemoryGauge`."""
        stats = self._stats()  # once: it takes longest
        return self._outside_bytes(stats) + _of(stats, "reserved_bytes", "peak")

    def outside_bytes(self) -> int:
        """See `MemoryGauge`."""
        return self._outside_bytes(self._stats())

    def taken_bytes(self) -> int:
        """See `MemoryGauge`."""
        stats = self._stats()
        return self._outside_bytes(stats) + _of(stats, "allocated_bytes", "current")

    def total_bytes(self) -> int:
        """See `MemoryGauge`."""
        return int(torch.cuda.mem_get_info(self._device)[1])

    def trim(self) -> None:
        """See `MemoryGauge`."""
        torch.cuda.empty_cache()

    def reserve(self, nbytes: int) -> None:
        """See `MemoryGauge`."""
        if nbytes <= 0:
            return
        try:
            with self._shortages.expected():
                torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            logger.info("offload budget: %s were not reserved at once: %s", short_size(nbytes), error)

    def watch(self, on_shortage: Callable[[], None]) -> None:
        """See `MemoryGauge`."""
        self._shortages.add(on_shortage)

    def record(self) -> bool:
        """See `MemoryGauge`."""
        return start_recording()

    def count(self) -> int:
        """See `MemoryGauge`."""
        stats = self._stats()
        return _of(stats, "allocation", "allocated") + _of(stats, "allocation", "freed")

    def recorded(self) -> AllocationLog | None:
        """See `MemoryGauge`."""
        return stop_recording(self._device.index)

    def _outside_bytes(self, stats: dict[str, Any]) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free) - _of(stats, "reserved_bytes", "current")

    def _stats(self) -> dict[str, Any]:
        return torch.cuda.memory_stats_as_nested_dict(self._device)  # a fifth of the time of memory_stats()


def _of(stats: dict[str, Any], name: str, which: str) -> int:
    return int(stats[name]["all"][which]) if stats else 0
