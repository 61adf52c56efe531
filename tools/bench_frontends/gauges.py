"""Memory of the device and of the host: `CudaGauge` of the other benchmark, and its counterpart for the CPU."""

from __future__ import annotations

import gc
from typing import NamedTuple

import torch
from bench_gpu.leftovers import Held
from bench_gpu.measure import CudaGauge, Gauge


class PinningGauge(CudaGauge):
    """Tells pinned memory that tensors use from what torch's allocator merely keeps of it."""

    def start(self) -> None:
        super().start()
        torch.empty(1, pin_memory=True)  # torch looks for blocks whose copies are over when it is asked for one
        torch.cuda.reset_peak_host_memory_stats()

    def read(self) -> dict[str, int]:
        peak = torch.cuda.host_memory_stats().get("active_bytes.peak", 0)
        return {**super().read(), "peak_pinned_bytes": int(peak)}

    def held(self) -> Held:
        return Held(torch.cuda.memory_allocated(), pinned(is_cuda=True).used_bytes)


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


class Pinned(NamedTuple):
    """Memory of torch's pinned allocator."""

    used_bytes: int
    kept_bytes: int
    """For a later use."""


def pinned(is_cuda: bool) -> Pinned:
    stats = torch.cuda.host_memory_stats() if is_cuda else {}
    used = int(stats.get("active_bytes.current", 0))
    return Pinned(used, max(0, int(stats.get("allocated_bytes.current", 0)) - used))


def give_back_kept_pinned(is_cuda: bool) -> None:
    """Returns to the system what torch's pinned allocator merely keeps."""
    if is_cuda:
        torch._C._host_emptyCache()


class HostUse:
    """What the process took of the host's memory since this was made, without what torch's allocator merely keeps.

    Pinned pages are resident where they were registered, and need not be where the driver obtained them: so it is the
    resident set that grew, or the pinned bytes in use, whichever by more. Never their sum.
    """

    def __init__(self, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._at_start = self._count()

    def taken(self) -> int:
        """Bytes; what was given back since does not count."""
        return max(0, *(now - then for now, then in zip(self._count(), self._at_start, strict=True)))

    def _count(self) -> tuple[int, int]:
        of_torch = pinned(self._is_cuda)
        return resident_set() - of_torch.kept_bytes, of_torch.used_bytes


def resident_set() -> int:
    """Bytes of the process's memory that are in RAM."""
    import psutil

    return int(psutil.Process().memory_info().rss)
