# SPDX-License-Identifier: Apache-2.0
"""What the copies of one step moved, counted where they are issued."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Direction:
    """Copies one way during one step."""

    nbytes: int = 0
    num_copies: int = 0
    events: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def gigabytes_per_second(self) -> float | None:
        """By the time that the copies themselves took; wait for the device first."""
        spent = sum(begin.elapsed_time(end) for begin, end in self.events)
        return self.nbytes / spent / 1e6 if spent else None


class CopyCounter:
    """Bytes and times of the copies of one step."""

    def __init__(self, new_event: Callable[[], Any] | None = None) -> None:
        self.out = Direction()
        self.back = Direction()
        self.host_bytes = 0
        self.host_bytes_max = 0
        self.misses = 0
        self._new_event = new_event or (lambda: torch.cuda.Event(enable_timing=True))

    @contextmanager
    def copy(self, is_out: bool, nbytes: int, stream: Any, num_copies: int = 1) -> Iterator[None]:
        """Count what is copied inside."""
        direction = self.out if is_out else self.back
        if isinstance(stream, int):  # a raw handle, as the CUDA device of the engine uses them
            stream = torch.cuda.ExternalStream(stream)
        begin, end = self._new_event(), self._new_event()
        begin.record(stream)
        yield
        end.record(stream)
        direction.nbytes += nbytes
        direction.num_copies += num_copies
        direction.events.append((begin, end))
        self.host_bytes += nbytes if is_out else -nbytes
        self.host_bytes_max = max(self.host_bytes_max, self.host_bytes)

    def moved(self, **more: Any) -> dict[str, Any]:
        """Return what the step moved, as fields of a record, and `more` of them; wait for the device first."""
        return {
            "copied_out_bytes": self.out.nbytes,
            "copied_in_bytes": self.back.nbytes,
            "num_copies_out": self.out.num_copies,
            "host_bytes_max": self.host_bytes_max,  # at once, in the order of issue: with those not released yet
            "prefetch_misses": self.misses,
            "out_gbps": self.out.gigabytes_per_second,
            "in_gbps": self.back.gigabytes_per_second,
            "is_confirmed": self.out.nbytes > 0,  # bytes were moved, and as many as the contender says
            "engine": {},  # the contender's own counters
            **more,
        }
