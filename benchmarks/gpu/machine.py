# SPDX-License-Identifier: Apache-2.0
"""What the machine can do, measured in the same run: link, small reads, pinning, and a group."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from benchmarks.group_cost import microseconds_of_a_group
from offload_engine import OffloadConfig, OffloadEngine

from .model import Ranks

MIB = 1 << 20
_PASS_BYTES = 1 << 30
_NUM_BUFFERS = 4
_QUEUE_BYTES = 512 * MIB
_SLAB_BYTES = 1 << 30


def measure_link(sizes: Sequence[int], ranks: Ranks) -> list[dict[str, Any]]:
    """Measure plain pinned copies of each size, on all ranks at once: GB/s out, in, and each way together."""
    streams = {"out": torch.cuda.Stream(), "in": torch.cuda.Stream()}
    found = []
    for size in sizes:
        buffers = [Pair(size) for _ in range(2 * _NUM_BUFFERS)]
        halves = {"out": buffers[:_NUM_BUFFERS], "in": buffers[_NUM_BUFFERS:]}
        record: dict[str, Any] = {"kind": "link", "rank": ranks.rank, "copy_bytes": size}
        for name, directions in {"out": ["out"], "in": ["in"], "both": ["out", "in"]}.items():
            rates = _best_rates({d: (streams[d], halves[d]) for d in directions}, size, ranks)
            prefix = "both_" if name == "both" else ""
            record.update({f"{prefix}{d}_gbps": rate for d, rate in rates.items()})
        found.append(record)
        del buffers, halves
    empty_caches()
    return found


class Pair:
    """A buffer on each side of the link."""

    def __init__(self, nbytes: int) -> None:
        self._host = torch.zeros(nbytes, dtype=torch.uint8).pin_memory()
        self._device = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")

    def copy(self, direction: str) -> None:
        if direction == "out":
            self._host.copy_(self._device, non_blocking=True)
        else:
            self._device.copy_(self._host, non_blocking=True)


def _best_rates(work: dict[str, tuple[Any, list[Pair]]], size: int, ranks: Ranks) -> dict[str, float]:
    num_copies = max(len(work) * _NUM_BUFFERS, _PASS_BYTES // size)
    best = dict.fromkeys(work, 0.0)
    for _ in range(3):
        torch.cuda.synchronize()
        ranks.barrier()
        events = {direction: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for direction in work}
        for direction, (stream, _) in work.items():
            events[direction][0].record(stream)
        for number in range(num_copies):
            for direction, (stream, pairs) in work.items():
                with torch.cuda.stream(stream):
                    pairs[number % len(pairs)].copy(direction)
        for direction, (stream, _) in work.items():
            events[direction][1].record(stream)
        torch.cuda.synchronize()
        for direction, (begin, end) in events.items():
            best[direction] = max(best[direction], num_copies * size / begin.elapsed_time(end) / 1e6)
    return best


def measure_reads(ranks: Ranks, repeats: int = 50) -> dict[str, Any]:
    """Time a host read of 512 bytes in ms, idle and under a full copy-out queue."""
    record: dict[str, Any] = {"kind": "host_read", "rank": ranks.rank, "queue_bytes": _QUEUE_BYTES}
    record |= _read_times(repeats)
    empty_caches()
    return record


def empty_caches() -> None:
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()


def _read_times(repeats: int) -> dict[str, float]:
    bulk, stream, small = Pair(_QUEUE_BYTES), torch.cuda.Stream(), torch.arange(64, device="cuda")

    def fill_queue() -> None:
        with torch.cuda.stream(stream):
            for _ in range(2):
                bulk.copy("out")

    times = {}
    engine = OffloadEngine()
    readers: dict[str, Callable[[], Any]] = {"cpu": small.cpu, "engine": lambda: engine.device.host_read(small).wait()}
    for name, read in readers.items():
        read()
        times[f"{name}_idle_ms"] = _median_ms(read, repeats, lambda: None)
        times[f"{name}_busy_ms"] = _median_ms(read, repeats, fill_queue)
    engine.close()
    return times


def _median_ms(read: Callable[[], Any], repeats: int, prepare: Callable[[], None]) -> float:
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        prepare()
        begin = time.perf_counter()
        read()
        times.append((time.perf_counter() - begin) * 1e3)
    torch.cuda.synchronize()
    return statistics.median(times)


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
