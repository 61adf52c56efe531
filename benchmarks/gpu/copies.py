# SPDX-License-Identifier: Apache-2.0
"""What the copies of one step moved, counted where they are issued."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class CopyCounter:
    """Bytes and times of the copies of one step, each way."""

    def __init__(self) -> None:
        self.out_bytes = self.in_bytes = 0
        self._events: dict[str, list[tuple[Any, Any]]] = {"out": [], "in": []}

    @contextmanager
    def copy(self, is_out: bool, nbytes: int, stream: Any) -> Iterator[None]:
        """Count what is copied inside."""
        if isinstance(stream, int):  # a raw handle, as the CUDA device of the engine uses them
            stream = torch.cuda.ExternalStream(stream)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        yield
        end.record(stream)
        self._events["out" if is_out else "in"].append((begin, end))
        self.out_bytes += nbytes if is_out else 0
        self.in_bytes += 0 if is_out else nbytes

    def moved(self, **more: Any) -> dict[str, Any]:
        """Return what the step moved, as fields of a record, and `more` of them; wait for the device first."""
        return {
            "copied_out_bytes": self.out_bytes,
            "copied_in_bytes": self.in_bytes,
            "out_gbps": self._rate("out", self.out_bytes),
            "in_gbps": self._rate("in", self.in_bytes),
            "is_confirmed": self.out_bytes > 0,  # bytes were moved, and as many as the contender says
            "engine": {},  # the contender's own counters
            **more,
        }

    def _rate(self, way: str, nbytes: int) -> float | None:
        """Return GB/s by the time that the copies themselves took."""
        spent = sum(begin.elapsed_time(end) for begin, end in self._events[way])
        return nbytes / spent / 1e6 if spent else None
