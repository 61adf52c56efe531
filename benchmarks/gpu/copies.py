# SPDX-License-Identifier: Apache-2.0
"""What the copies of one step moved, counted where they are issued."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class CopyCounter:
    """Bytes and times of the copies of one step, each way: "out" and "in"."""

    def __init__(self) -> None:
        self.nbytes = {"out": 0, "in": 0}
        self._events: dict[str, list[tuple[Any, Any]]] = {"out": [], "in": []}

    @contextmanager
    def copy(self, way: str, nbytes: int, stream: Any) -> Iterator[None]:
        """Count what is copied inside."""
        if isinstance(stream, int):  # a raw handle, as the CUDA device of the engine uses them
            stream = torch.cuda.ExternalStream(stream)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        yield
        end.record(stream)
        self._events[way].append((begin, end))
        self.nbytes[way] += nbytes

    def moved(self, **more: Any) -> dict[str, Any]:
        """Return what the step moved, as fields of a record, and `more` of them; wait for the device first."""
        found: dict[str, Any] = {}
        for way, nbytes in self.nbytes.items():
            ms = sum(begin.elapsed_time(end) for begin, end in self._events[way])  # that the copies themselves took
            found |= {f"copied_{way}_bytes": nbytes, f"{way}_gbps": nbytes / ms / 1e6 if ms else None}
        # Bytes were moved, and as many as the contender says; `engine` has its own counters.
        return {**found, "is_confirmed": self.nbytes["out"] > 0, "engine": {}, **more}
