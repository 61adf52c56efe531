# SPDX-License-Identifier: Apache-2.0
"""`RetireQueue`: retires storages after autograd has dropped their last handle."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from offload_engine._host.try_lock import run_if_free
from offload_engine._saved.failures import CopyFailures
from offload_engine._saved.storage import SavedStorage


class RetireQueue:
    """Defers retirement: a storage whose last handle is dropped during an operation of the store is retired after it.

    The last handle may be dropped at any time: the garbage collector frees graphs in cycles, in the middle of an
    operation and in any thread. So an operation of the store runs under `with queue, queue.lock`: nothing is retired
    inside `lock`, and entry to and exit from the queue call `drain`.

    Nothing is retired in a thread that copies, where the collector may run as well: retirement waits for a copy in
    flight, so the thread might wait for itself. The next operation that ends in another thread retires instead.

    An interrupt may end an operation between any two lines. It is then noted, nothing is undone or retired any more,
    and the reset makes new books, with a new queue and a new lock. Other threads continue until then, so operations use
    `with lock`: with separate calls, an interrupt between two lines could leave the lock held.

    Python ignores an exception raised in a destructor, and an interrupt may come in the destructor of a handle: in a
    backward that runs in the main thread, that is often the first Python code for a long time. The next boundary raises
    the interrupt.

    Args:
        is_copy_thread: returns True in a thread that copies.
        retire: releases all memory of a storage; never called while an operation holds `lock`.
        failures: records interrupts.

    Attributes:
        lock: held during an operation.
        dropped: storages without a handle that are not retired yet.
    """

    def __init__(
        self, is_copy_thread: Callable[[], bool], retire: Callable[[SavedStorage], None], failures: CopyFailures
    ) -> None:
        self.lock: Any = threading.RLock()
        self._is_copy_thread = is_copy_thread
        self._retire = retire
        self._failures = failures
        self.dropped: deque[SavedStorage] = deque()

    def __enter__(self) -> RetireQueue:
        if self.dropped:
            self.drain()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is not None:
            self._failures.note(exc)
        if self.dropped:
            self.drain()

    def retire(self, saved: SavedStorage) -> None:
        """Retire a storage whose last handle was dropped, now or with the next operation; for destructors."""
        self.dropped.append(saved)
        if saved.buffer is not None or saved.emptied is not None:  # otherwise it can wait for the next operation
            self.drain()

    def defer_interrupt(self, error: BaseException) -> None:
        """Defer an interrupt that came in a destructor to the next boundary; raise any other error."""
        if isinstance(error, Exception):
            raise error
        self._failures.defer_interrupt(error)

    def drain(self) -> None:
        """Retire the dropped storages. No-op during an operation, which drains at its end, and after a torn one."""
        if self._failures.is_torn:
            return
        try:
            # Again, because the operation that held the lock may have drained before the last one was dropped.
            while self.dropped and not self._is_copy_thread() and run_if_free(self.lock, self._retire_dropped):
                pass
        except BaseException as error:
            self._failures.note(error)
            raise

    def check(self, live: Iterable[SavedStorage]) -> None:
        """Check that no storage among `live` has lost handles that never reported their destruction.

        Raises:
            KeyboardInterrupt: if one has: an interrupt ended a destructor before it was done.
        """
        if self._failures.is_torn:  # the interrupt was already raised
            return
        self.drain()
        with self, self.lock:
            is_lost = any([saved.has_lost_handles() and saved not in self.dropped for saved in live])
        if is_lost:
            interrupt = KeyboardInterrupt("it came while a saved tensor was freed, where Python ignores it")
            self._failures.note(interrupt)
            raise interrupt

    def _retire_dropped(self) -> None:
        while self.dropped:
            saved = self.dropped.popleft()
            if not saved.handles:  # otherwise it has been packed again
                self._retire(saved)
