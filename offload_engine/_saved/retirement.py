"""`RetireQueue`: when a storage retires whose last handle autograd has dropped."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from offload_engine._saved.storage import SavedStorage

Retire = Callable[[SavedStorage], None]


class RetireQueue:
    """Defers retirement: a storage whose last handle goes during an operation of the store is retired after it.

    The last handle may go at any time: the garbage collector finds graphs in cycles, in the middle of an operation and
    in any thread. So an operation of the store holds `lock`, which is not reentrant, and calls `drain` after it.

    What has a copy under way does not retire in a thread that copies, where the collector may run as well: to retire it
    takes a wait for that copy, and the thread might wait for itself. The next operation that ends elsewhere does it.

    The lock is taken and given back by its own `with`: between two lines of ours an interrupt could leave it taken.

    Args:
        is_copy_thread: true in a thread that copies.

    Attributes:
        lock: held during an operation.
        dropped: storages without a handle that are not retired yet.
    """

    def __init__(self, is_copy_thread: Callable[[], bool]) -> None:
        self.lock: threading.Lock = threading.Lock()
        self._is_copy_thread = is_copy_thread
        self.dropped: deque[SavedStorage] = deque()

    def retire(self, saved: SavedStorage, retire: Retire) -> None:
        """Call `retire(saved)` now, or after the operation under way.

        In a thread that copies, what has a copy under way waits for the end of an operation, too.
        """
        if self.lock.acquire(False):
            try:
                if saved.num_handles == 0:  # else another thread packed the storage once more
                    # Few have a copy left to wait for, so the device is seldom asked.
                    if (saved.pending is not None or saved.emptied is not None) and self._is_copy_thread():
                        self.dropped.append(saved)
                    else:
                        retire(saved)
            except KeyboardInterrupt:  # a destructor swallows it: the next operation tries again
                self.dropped.append(saved)
                raise
            finally:
                self.lock.release()
        else:
            self.dropped.append(saved)
        if self.dropped:  # the operation, in whatever thread, may have looked there before
            self.drain(retire)

    def drain(self, retire: Retire) -> None:
        """Retire what autograd has dropped, unless an operation is under way: its end does that."""
        while self.dropped and not self._is_copy_thread() and self.lock.acquire(blocking=False):
            try:
                while self.dropped:
                    saved = self.dropped.popleft()
                    if saved.num_handles == 0:  # else the operation packed the storage once more
                        try:
                            retire(saved)
                        except KeyboardInterrupt:
                            self.dropped.append(saved)
                            raise
            finally:
                self.lock.release()
