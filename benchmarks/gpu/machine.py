# SPDX-License-Identifier: Apache-2.0
"""What the machine can do, measured in the same run: link, pinning, and a group."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from benchmarks.group_cost import microseconds_of_a_group
from offload_engine import OffloadConfig, OffloadEngine

from .model import Ranks

_PASS_BYTES = 1 << 30
_NUM_BUFFERS = 4
_SLAB_BYTES = 1 << 30


def measure_link(size: int, ranks: Ranks) -> dict[str, Any]:
    """Measure plain pinned copies of `size` bytes, on all ranks at once: GB/s out, in, and each way together."""
    streams = {"out": torch.cuda.Stream(), "in": torch.cuda.Stream()}
    device = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2 * _NUM_BUFFERS)]
    host = [torch.zeros(size, dtype=torch.uint8).pin_memory() for _ in range(2 * _NUM_BUFFERS)]
    pairs = {
        "out": list(zip(host, device, strict=True))[:_NUM_BUFFERS],
        "in": list(zip(device, host, strict=True))[_NUM_BUFFERS:],
    }
    record: dict[str, Any] = {"kind": "link", "rank": ranks.rank, "copy_bytes": size}
    for prefix, directions in (("", ["out"]), ("", ["in"]), ("both_", ["out", "in"])):
        for _ in range(3):
            ranks.barrier()
            rates = _rates({way: (streams[way], pairs[way]) for way in directions}, size)
            for way, rate in rates.items():
                name = f"{prefix}{way}_gbps"
                record[name] = max(rate, record.get(name, 0.0))
    del device, host, pairs
    empty_caches()
    return record


def _rates(work: dict[str, tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]], size: int) -> dict[str, float]:
    """Copy on one or two streams at once; return GB/s of each."""
    num_copies = max(len(work) * _NUM_BUFFERS, _PASS_BYTES // size)
    torch.cuda.synchronize()
    events = {way: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for way in work}
    for way, (stream, _) in work.items():
        events[way][0].record(stream)
    for number in range(num_copies):
        for stream, pairs in work.values():
            target, source = pairs[number % len(pairs)]
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
    for way, (stream, _) in work.items():
        events[way][1].record(stream)
    torch.cuda.synchronize()
    return {way: num_copies * size / begin.elapsed_time(end) / 1e6 for way, (begin, end) in events.items()}


def empty_caches() -> None:
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()


def measure_pinning() -> dict[str, Any]:
    """Measure GB/s at which 1 GiB of host memory gets pinned: by cudaHostAlloc, and by the engine's device."""
    engine = OffloadEngine(OffloadConfig())

    def host_alloc() -> Callable[[], None]:
        blocks = [torch.empty(_SLAB_BYTES, dtype=torch.uint8, pin_memory=True)]
        return blocks.clear

    def slab() -> Callable[[], None]:
        return engine.device.new_slab(_SLAB_BYTES).close

    try:
        rates = {"host_alloc_gbps": _best_rate(host_alloc), "slab_gbps": _best_rate(slab)}
    finally:
        engine.close()
    return {"kind": "pinning", "nbytes": _SLAB_BYTES, **rates}


def _best_rate(obtain: Callable[[], Callable[[], None]]) -> float:
    # The first time the system itself is slow: it has to find the pages.
    rates = []
    for _ in range(2):
        begin = time.perf_counter()
        free = obtain()
        rates.append(_SLAB_BYTES / (time.perf_counter() - begin) / 1e9)
        free()
        del free
        torch._C._host_emptyCache()
    return max(rates)


def measure_group_cost() -> dict[str, Any]:
    """Measure host microseconds of one group of three tensors, forward and backward."""
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0))
    try:
        return {"kind": "group_cost", "num_tensors": 3, "us": microseconds_of_a_group(engine)}
    finally:
        with suppress(RuntimeError):
            engine.close()
