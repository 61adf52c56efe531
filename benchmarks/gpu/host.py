# SPDX-License-Identifier: Apache-2.0
"""How much more slowly the host works while the link is busy, measured in the same run."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from .link import Pair, empty_caches
from .model import Ranks

_COPY_BYTES = 1 << 30  # under way for 19 ms at 55 GB/s: longer than the work beside it
_NUM_OBJECTS = 400_000  # some 160 MB: more than the caches hold
_NUM_VISITS = 4000
_REPEATS = 15
_BESIDE = ("idle", "out", "in")


def measure_host(ranks: Ranks) -> dict[str, Any]:
    """Time two kinds of Python in ms, without a copy and beside one in each direction, in turns.

    One walks through objects whose memory is hardly in the caches, as most of a training step does; one stays in them.
    """
    pair, stream = Pair(_COPY_BYTES), torch.cuda.Stream()
    record: dict[str, Any] = {"kind": "host", "rank": ranks.rank, "copy_bytes": _COPY_BYTES}
    for name, work in {"cold": _walks(), "hot": itertools.repeat(_count)}.items():
        times: dict[str, list[float]] = {direction: [] for direction in _BESIDE}
        for _ in range(_REPEATS):
            for direction in _BESIDE:
                times[direction].append(_milliseconds(next(work), pair, stream, direction))
        record.update({f"{name}_{direction}_ms": statistics.median(own) for direction, own in times.items()})
    del pair
    empty_caches()
    return record


def _walks() -> Iterator[Callable[[], int]]:
    """Yield walks that each visit other objects, in random order."""
    objects: list[dict[str, Any]] = [{"name": str(number), "values": [number] * 8} for number in range(_NUM_OBJECTS)]
    chance = random.Random(0)
    while True:
        yield partial(_visit, objects, chance.sample(range(_NUM_OBJECTS), _NUM_VISITS))


def _visit(objects: Sequence[dict[str, Any]], visits: Sequence[int]) -> int:
    return sum(len(objects[i]["name"]) + objects[i]["values"][3] for i in visits)


def _count() -> int:
    return sum(number * number for number in range(20_000))


def _milliseconds(work: Callable[[], int], pair: Pair, stream: Any, direction: str) -> float:
    torch.cuda.synchronize()
    if direction != "idle":
        with torch.cuda.stream(stream):
            pair.copy(direction)
    begin = time.perf_counter()
    work()
    milliseconds = (time.perf_counter() - begin) * 1e3
    torch.cuda.synchronize()
    return milliseconds
