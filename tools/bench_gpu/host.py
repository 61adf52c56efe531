"""How much more slowly the host works while the link is busy, measured in the same run."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from .link import Pair
from .model import Ranks

_COPY_BYTES = 1 << 30  # under way for 19 ms at 55 GB/s: longer than the work beside it
_NUM_OBJECTS = 400_000  # some 100 MB: more than the caches hold
_NUM_VISITS = 4000
_REPEATS = 15


def measure_host(ranks: Ranks) -> dict[str, Any]:
    """Milliseconds of two kinds of Python, without a copy and beside one in each direction.

    One walks through objects whose memory is in no cache, as most of a training step does; one stays in the caches.
    """
    pair, stream = Pair(_COPY_BYTES), torch.cuda.Stream()
    record: dict[str, Any] = {"kind": "host", "rank": ranks.rank, "copy_bytes": _COPY_BYTES}
    for name, work in {"cold": _walk(), "hot": _count}.items():
        for direction in ("idle", "out", "in"):
            record[f"{name}_{direction}_ms"] = _median_ms(work, pair, stream, direction)
    del pair
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()
    return record


def _walk() -> Callable[[], int]:
    objects = [{"name": str(number), "values": [number] * 8} for number in range(_NUM_OBJECTS)]
    visits = random.Random(0).sample(range(_NUM_OBJECTS), _NUM_VISITS)
    return lambda: sum(len(objects[i]["name"]) + objects[i]["values"][3] for i in visits)  # type: ignore[arg-type, misc]


def _count() -> int:
    return sum(number * number for number in range(20_000))


def _median_ms(work: Callable[[], int], pair: Pair, stream: Any, direction: str) -> float:
    times = []
    for _ in range(_REPEATS):
        torch.cuda.synchronize()
        if direction != "idle":
            with torch.cuda.stream(stream):
                pair.copy(direction)
        begin = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin) * 1e3)
    torch.cuda.synchronize()
    return statistics.median(times)
