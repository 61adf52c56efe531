"""Bounds of a turn: a contender that takes too long, or too much of the host's memory, is interrupted."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

_INTERVAL_S = 0.5  # reading the counters takes 0.2 ms, which the steps pay
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class Stopped(RuntimeError):
    """A contender exceeded a bound."""


class OutOfTime(Stopped):
    """That of time: how far it would have come is not known."""


class OutOfHostMemory(Stopped):
    """That of host memory."""


class CrowdedOut(OutOfHostMemory):
    """The same, where others had left less of it than a contender may take: how far it would have come is not known."""


class Watch:
    """Context manager of the main thread: raises `Stopped` in it at a bound, and again until the block is left.

    A timer's signal does it, which Python delivers between two of its instructions: in a forward at the next saved
    tensor, in a backward on a GPU when it is over. The system's own end of a process that took too much memory would
    end the whole run.

    Args:
        seconds: how long the block may take.
        host_bytes: how much host memory the block may take.
        read_host_bytes: how much it has taken so far.
        crowded_bytes: how much others hold, which is not there for the block.
    """

    def __init__(
        self, seconds: float, host_bytes: int, read_host_bytes: Callable[[], int], crowded_bytes: int = 0
    ) -> None:
        self._seconds = seconds
        self._host_bytes = max(0, host_bytes - crowded_bytes)
        self._crowded_bytes = crowded_bytes
        self._read_host_bytes = read_host_bytes
        self._deadline = 0.0
        self._is_on = False
        self._before: Any = None

    def __enter__(self) -> Watch:
        self._deadline = time.monotonic() + self._seconds
        self._before = signal.signal(signal.SIGALRM, self._look)
        signal.siginterrupt(signal.SIGALRM, False)  # system calls of drivers go on
        self._is_on = True
        signal.setitimer(signal.ITIMER_REAL, _INTERVAL_S, _INTERVAL_S)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_on = False  # first: a signal may be under way
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def _look(self, number: int, frame: FrameType | None) -> None:
        if not self._is_on:
            return
        if time.monotonic() > self._deadline:
            raise OutOfTime(f"its {self._seconds:.0f} s were over")
        held = self._read_host_bytes()
        if held <= self._host_bytes:
            return
        told = f"it held {held / 2**30:.0f} GiB of host memory, {self._host_bytes / 2**30:.0f} are allowed"
        if self._crowded_bytes:
            raise CrowdedOut(f"{told}, as others left {self._crowded_bytes / 2**30:.0f}")
        raise OutOfHostMemory(told)


def host_memory_limit() -> int:
    """Return the bytes of host memory that this process may have: the machine's, or its container's."""
    import psutil

    limits = [psutil.virtual_memory().total]
    for path in map(Path, _CGROUP_LIMITS):
        if path.exists() and (text := path.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits)
