# SPDX-License-Identifier: Apache-2.0
"""What the copies of one step moved, and what was on the host, and there only, at the peak of device memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


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


class HostAtPeak:
    """Finds the peak of one step among stretches in which the bytes on the host only stay the same.

    `take_peak` returns the most bytes allocated since its last call.
    """

    def __init__(self, take_peak: Callable[[], int]) -> None:
        self.peak_allocated_bytes = 0
        self.host_bytes = 0
        self._take_peak = take_peak

    def mark(self, host_bytes: int) -> None:
        """End a stretch with so many bytes on the host only: before bytes are copied, and at the end of the step."""
        peak = self._take_peak()
        # Not where it is equal: what leaves the device behind a mark is gone already by `host_bytes` of the next one.
        if peak > self.peak_allocated_bytes:
            self.peak_allocated_bytes, self.host_bytes = peak, host_bytes


class CopyCounter:
    """Bytes and times of the copies of one step, counted where they are issued."""

    def __init__(self, new_event: Callable[[], Any] | None, take_peak: Callable[[], int]) -> None:
        self.out = Direction()
        self.back = Direction()
        self.host_bytes = 0
        self.host_bytes_max = 0
        self.at_peak = HostAtPeak(take_peak)
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
            "host_bytes_at_peak": self.at_peak.host_bytes,  # when the most device memory was allocated
            "prefetch_misses": self.misses,
            "out_gbps": self.out.gigabytes_per_second,
            "in_gbps": self.back.gigabytes_per_second,
            "is_confirmed": self.out.nbytes > 0,  # bytes were moved, and as many as the contender says
            "engine": {},  # the contender's own counters
            **more,
        }


class PlainCopies:
    """Copies of one buffer of so many bytes to pinned memory and back, on streams which no stream waits for."""

    def __init__(self, nbytes: int) -> None:
        self.counter: CopyCounter | None = None
        self._device = torch.empty(2, nbytes, dtype=torch.uint8, device="cuda")
        self._host = torch.empty(2, nbytes, dtype=torch.uint8, pin_memory=True)
        self._streams = torch.cuda.Stream(), torch.cuda.Stream()

    def copy(self, is_out: bool) -> None:
        """Copy behind the work that the current stream has been given so far."""
        way, target, source = (0, self._host, self._device) if is_out else (1, self._device, self._host)
        stream = self._streams[way]
        counter = nullcontext() if self.counter is None else self.counter.copy(is_out, target[way].nbytes, stream)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), counter:
            target[way].copy_(source[way], non_blocking=True)


class HostCopies:
    """Copies on the host, for a contender that keeps no account of which of them have no twin on the device."""

    def __init__(self) -> None:
        self._sources: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, copy: torch.Tensor, source: torch.Tensor) -> None:
        """Note that `copy` holds what `source` held on the device. It must live until `remove`."""
        self._sources[id(copy)] = StorageWeakRef(source.untyped_storage()), copy.nbytes

    def remove(self, copy: torch.Tensor) -> None:
        """Forget a copy that is being copied in. No-op for an unknown copy."""
        self._sources.pop(id(copy), None)

    @property
    def only_bytes(self) -> int:
        """Return the bytes whose storage on the device is gone, or has been emptied."""
        return sum(nbytes for source, nbytes in self._sources.values() if _is_gone(source))


def _is_gone(reference: StorageWeakRef) -> bool:
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return storage is None or storage.nbytes() == 0
