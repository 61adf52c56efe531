"""Memory of the device and of the host: `CudaGauge` of the other benchmark, and its counterpart for the CPU."""

from __future__ import annotations

import gc

import torch
from bench_gpu.leftovers import Held
from bench_gpu.measure import CudaGauge, Gauge


class CpuGauge:
    """Without a GPU only the process has memory; there is nothing that would tell peaks of the device."""

    def wait(self) -> None: ...

    def start(self) -> None:
        gc.collect()

    def read(self) -> dict[str, int]:
        return {
            "peak_allocated_bytes": 0,
            "peak_reserved_bytes": 0,
            "torch_pinned_bytes": 0,
            "host_rss_bytes": resident_set(),
            "alloc_retries": 0,
            "device_allocs": 0,
        }

    def release(self) -> None:
        gc.collect()

    def current(self) -> tuple[int, int]:
        return resident_set(), resident_set()

    def held(self) -> Held:
        return Held(0, 0)


def make_gauge(device: str) -> Gauge:
    return CudaGauge() if device == "cuda" else CpuGauge()


def held_host_bytes(rss_at_start: int, is_cuda: bool) -> int:
    """What the process holds of the host's memory. What cudaHostAlloc pins need not count as its resident set."""
    pinned = int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)) if is_cuda else 0
    return max(resident_set(), rss_at_start + pinned)


def resident_set() -> int:
    """Bytes of the process's memory that are in RAM."""
    import psutil

    return int(psutil.Process().memory_info().rss)
