"""Memory of the device and of the host: `CudaGauge` of the other benchmark, and its counterpart for the CPU."""

from __future__ import annotations

import gc

import torch

from benchmarks.gpu.leftovers import Held
from benchmarks.gpu.measure import CudaGauge, Gauge


class PinningGauge(CudaGauge):
    """Reads the most that torch's allocator had pinned, too.

    By what it has pinned, in use or not: its count of what is in use does not go down where a block is free again as
    soon as it is given back.
    """

    def start(self) -> None:
        super().start()
        torch.cuda.reset_peak_host_memory_stats()

    def read(self) -> dict[str, int]:
        peak = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
        return {**super().read(), "peak_pinned_bytes": int(peak)}


class CpuGauge:
    """Without a GPU only the process has memory; there is nothing that would tell peaks of the device."""

    def wait(self) -> None: ...

    def start(self) -> None:
        gc.collect()

    def read(self) -> dict[str, int]:
        return {
            "peak_allocated_bytes": 0,
            "peak_reserved_bytes": 0,
            "peak_pinned_bytes": 0,
            "torch_pinned_bytes": 0,
            "host_rss_bytes": resident_set(),
            "alloc_retries": 0,
            "device_allocs": 0,
        }

    def take_peak(self) -> int:
        return 0

    def release(self) -> None:
        gc.collect()

    def current(self) -> tuple[int, int]:
        return resident_set(), resident_set()

    def held(self) -> Held:
        return Held(0, 0)


def make_gauge(device: str) -> Gauge:
    return PinningGauge() if device == "cuda" else CpuGauge()


def pinned_bytes(is_cuda: bool) -> int:
    """Return the bytes that torch's allocator has pinned."""
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)) if is_cuda else 0


class HostUse:
    """What the process took of the host's memory since this was made.

    Pinned pages are resident where they were registered, and need not be where the driver obtained them: so it is the
    resident set that grew, or what is pinned, whichever by more. Never their sum.
    """

    def __init__(self, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._at_start = self._count()

    def taken(self) -> int:
        """Return the bytes taken; what was returned since does not count."""
        return max(0, *(now - then for now, then in zip(self._count(), self._at_start, strict=True)))

    def _count(self) -> tuple[int, int]:
        return resident_set(), pinned_bytes(self._is_cuda)


def resident_set() -> int:
    """Return the bytes of the process's memory that are in RAM."""
    import psutil

    return int(psutil.Process().memory_info().rss)
