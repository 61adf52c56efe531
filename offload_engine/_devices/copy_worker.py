# SPDX-License-Identifier: Apache-2.0
"""Implements a copy stream as one thread and a queue, and its events: the asynchronous half of the CPU device.

NOTE [Errors on a stream]
1. A copy that fails does not stop the worker: it notes the error and continues with the next entry.
2. From the failure to the next `record_event`, further copies of the stream are skipped. That event carries the error
   and clears it from the stream. So an error reaches the events of its own work, and no later step.
3. A stream that waits for a failed event takes over the error, as if one of its own copies had failed (rule 2).
4. When the host waits for such an event, a `CopyError` is raised, with the original error as its cause.
"""

from __future__ import annotations

import os
import threading
from queue import SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch

from offload_engine._devices.base import CopyError


class CopyableSlab(Protocol):
    """A host slab that moves bytes from and to a memory address on the calling thread."""

    nbytes: int

    def write(self, address: int, offset: int, nbytes: int) -> None: ...

    def read(self, address: int, offset: int, nbytes: int) -> None: ...

    def close(self) -> None: ...


class Failure(NamedTuple):
    """Failure of a copy: a readable sentence, and the error as raised (without its frames)."""

    message: str
    cause: Exception


class CopyEvent:
    """Completes once, with or without a failure. Cheap to make: one is recorded for every group."""

    __slots__ = ("_lock", "failure", "is_done")

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held until the event completes; to wait is to acquire it
        self._lock.acquire()
        self.is_done = False
        self.failure: Failure | None = None

    def complete(self, failure: Failure | None = None) -> None:
        """Complete the event. Called once, by the worker."""
        self.failure = failure
        self.is_done = True
        self._lock.release()

    def wait(self) -> None:
        """Block until the event is complete; do not raise a failure."""
        if not self.is_done:
            with self._lock:
                pass

    def raise_failure(self) -> None:
        """Raise the `CopyError` of a failed event. No-op for any other."""
        if self.failure is not None:
            raise CopyError(self.failure.message) from self.failure.cause


class CopyTimeMark:
    """Notes when a thread has reached one point of its work."""

    __slots__ = ("_lock", "_seconds")

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held until the moment comes
        self._lock.acquire()
        self._seconds: float | None = None

    def strike(self) -> None:
        """Note that the moment has come. Called once."""
        self._seconds = perf_counter()
        self._lock.release()

    def seconds(self) -> float:
        """Return the moment on the clock of `perf_counter`; blocks until it has come."""
        if self._seconds is None:
            with self._lock:
                pass
        assert self._seconds is not None
        return self._seconds


class ProcessGuard:
    """Binds a device to the process that first used it: threads do not survive a fork, and files would be shared."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self.is_closed = False

    @property
    def is_foreign(self) -> bool:
        """Return whether another process used the device first."""
        return self._pid is not None and self._pid != os.getpid()

    def claim(self) -> int:
        """Bind to this process, or confirm it.

        Raises:
            RuntimeError: if the device is closed, or belongs to the process this one was forked from.
        """
        if self.is_closed:
            raise RuntimeError("the CPU device is closed: make a new one")
        if self.is_foreign:
            raise RuntimeError(
                f"the CPU device was in use in process {self._pid} when it forked this one ({os.getpid()}): "
                "make a new engine in the child"
            )
        self._pid = os.getpid()
        return self._pid


class CopyThread(threading.Thread):
    """Works through a queue of copies. It refers only to the queue, so an engine dropped without close() is freed."""

    def __init__(self, name: str, queue: SimpleQueue[tuple[Any, ...] | None]) -> None:
        self.has_begun = threading.Event()
        super().__init__(target=_work, args=(queue, self.has_begun), name=name, daemon=True)

    @staticmethod
    def is_current() -> bool:
        """Return whether this is such a thread, of any device."""
        return isinstance(threading.current_thread(), CopyThread)


class CopyStream:
    """Owns one worker thread, started by the first entry, and the queue it works through in order."""

    def __init__(self, name: str, guard: ProcessGuard) -> None:
        self.name = name
        self._guard = guard
        self._queue: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self._thread: CopyThread | None = None
        self._start_lock = threading.Lock()
        self._pid = 0  # of the process the thread runs in

    def __repr__(self) -> str:
        return f"CopyStream({self.name})"

    def record(self) -> CopyEvent:
        event = CopyEvent()
        if self._thread is None:  # nothing was ever queued, so the event is complete without starting a thread
            self._guard.claim()
            event.complete()
        else:
            self._put((_record, event))
        return event

    def wait(self, event: CopyEvent) -> None:
        self._put((_wait, event))

    def mark(self) -> CopyTimeMark:
        mark = CopyTimeMark()
        self._put((_mark, mark))
        return mark

    def write(self, source: torch.Tensor, slab: CopyableSlab, offset: int) -> None:
        self._put((_write, source, slab, offset))

    def read(self, slab: CopyableSlab, offset: int, target: torch.Tensor) -> None:
        self._put((_read, target, slab, offset))

    def close(self) -> None:
        """Finish the queue and join the thread. Idempotent; joins nothing in a forked child."""
        thread = self._thread
        if thread is not None and not self._guard.is_foreign:
            self._queue.put(None)
            thread.join()
        self._thread, self._pid = None, 0  # last, so that after an interrupt the next call continues

    def _put(self, entry: tuple[Any, ...]) -> None:
        if self._pid != os.getpid():
            self._start()
        self._queue.put(entry)

    def _start(self) -> None:
        pid = self._guard.claim()
        with self._start_lock:
            if self._thread is None:
                self._thread = CopyThread(f"offload-{self.name}", self._queue)
                try:
                    self._thread.start()
                except BaseException as error:
                    # After an interrupt the thread may still run, and then it begins at once. Two would race.
                    if isinstance(error, Exception) or not self._thread.has_begun.wait(1.0):
                        self._thread = None
                    raise
            self._pid = pid


def _work(queue: SimpleQueue[tuple[Any, ...] | None], has_begun: threading.Event) -> None:
    has_begun.set()
    failure: Failure | None = None
    while (entry := queue.get()) is not None:
        failure = entry[0](failure, *entry[1:])
        del entry  # the queue waits without a reference to the tensor


def _record(failure: Failure | None, event: CopyEvent) -> None:
    event.complete(failure)


def _wait(failure: Failure | None, event: CopyEvent) -> Failure | None:
    event.wait()
    return failure or event.failure


def _mark(failure: Failure | None, mark: CopyTimeMark) -> Failure | None:
    mark.strike()
    return failure


def _write(failure: Failure | None, source: torch.Tensor, slab: CopyableSlab, offset: int) -> Failure | None:
    if failure is not None:
        return failure
    try:
        storage = source.untyped_storage()
        slab.write(storage.data_ptr(), offset, storage.nbytes())
    except Exception as error:  # any error is raised in the thread that waits, not in this one
        return _failure(f"copy-out of {source.untyped_storage().nbytes():,} bytes to {slab} failed", error)
    return None


def _read(failure: Failure | None, target: torch.Tensor, slab: CopyableSlab, offset: int) -> Failure | None:
    if failure is not None:
        return failure
    try:
        storage = target.untyped_storage()
        slab.read(storage.data_ptr(), offset, storage.nbytes())
    except Exception as error:
        return _failure(f"copy-in of {target.untyped_storage().nbytes():,} bytes from {slab} failed", error)
    return None


def _failure(what: str, error: Exception) -> Failure:
    # Without its traceback: the frames would keep the tensor alive as long as the event.
    return Failure(f"{what}: {error}", error.with_traceback(None))
