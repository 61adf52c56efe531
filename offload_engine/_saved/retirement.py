"""`RetireQueue`: retires storages after autograd has dropped their last handle."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from offload_engine._saved.storage import SavedStorage


class RetireQueue:
    """Defers retirement: a storage whose last handle goes during an operation of the store is retired after it.

    The last handle may be dropped at any time: the garbage collector frees graphs in cycles, in the middle of an
    operation and in any thread. So an operation of the store holds `lock`, which is not reentrant, and calls `drain`
    afterwards.

    A storage with a copy in flight is not retired in a thread that copies, where the collector may run as well:
    retiring waits for that copy, and the thread might wait for itself. The next operation that ends in another thread
    retires it.

    Operations use `with lock`: with separate calls, an interrupt between two lines could leave the lock held.

    Args:
        is_copy_thread: returns True in a thread that copies.
        retire: releases all memory of a storage; never called while an operation holds `lock`.

    Attributes:
        lock: held during an operation.
        dropped: storages without a handle that are not retired yet.
    """

    def __init__(self, is_copy_thread: Callable[[], bool], retire: Callable[[SavedStorage], None]) -> None:
        self.lock: threading.Lock = threading.Lock()
        self._is_copy_thread = is_copy_thread
        self._retire = retire
        self.dropped: deque[SavedStorage] = deque()

    def retire(self, saved: SavedStorage) -> None:
        """Retire a storage whose last handle was dropped, now or after the running operation.

        In a thread that copies, a storage with a copy in flight is retired after an operation, too.
        """
        if self.lock.acquire(False):
            try:
                if not saved.handles:  # otherwise another thread has packed the storage again
                    # Few storages have a copy left to wait for, so the device is seldom called.
                    if (saved.pending is not None or saved.emptied is not None) and self._is_copy_thread():
                        self.dropped.append(saved)
                    else:
                        self._retire(saved)
            except KeyboardInterrupt:  # raised inside a destructor it is lost, so the next operation retries
                self.dropped.append(saved)
                raise
            finally:
                self.lock.release()
        else:
            self.dropped.append(saved)
        if self.dropped:  # the operation that held the lock may have drained before this append
            self.drain()

    def drain(self) -> None:
        """Retire the dropped storages, unless an operation is running, which drains at its end."""
        while self.dropped and not self._is_copy_thread() and self.lock.acquire(blocking=False):
            try:
                while self.dropped:
                    saved = self.dropped.popleft()
                    if not saved.handles:  # otherwise the operation has packed the storage again
                        try:
                            self._retire(saved)
                        except KeyboardInterrupt:
                            self.dropped.append(saved)
                            raise
            finally:
                self.lock.release()
