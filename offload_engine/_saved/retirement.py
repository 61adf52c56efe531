"""When a storage retires whose last handle autograd has dropped: between two steps of the store, never in one."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from types import TracebackType

from offload_engine._saved.storage import SavedStorage


class Retirement(ABC):
    """What a store needs so that nothing it works on goes under its hands.

    The last handle may go at any time: the garbage collector finds graphs in cycles, in the middle of a step and in any
    thread. So a step is `with self, self._lock`, not reentrant. In the middle of it no storage retires; what autograd
    drops meanwhile retires when the store, as a context manager, is left, behind the lock.

    What has a copy under way does not retire in a thread that copies, where the collector may run as well: to retire it
    takes a wait for that copy, and the thread might wait for itself. The next step that ends elsewhere does it.

    The lock is taken and given back by its own `with`: between two lines of ours an interrupt could leave it taken.

    Args:
        is_copy_thread: true in a thread that copies.
    """

    def __init__(self, is_copy_thread: Callable[[], bool]) -> None:
        self._is_copy_thread = is_copy_thread
        self._lock = threading.Lock()  # held during a step
        self._dropped: deque[SavedStorage] = deque()  # without a handle, not retired yet

    def __enter__(self) -> Retirement:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._dropped:
            self._retire_dropped()

    def retire(self, saved: SavedStorage) -> None:
        """Autograd has dropped the last handle: give everything back, where a step is under way after it.

        In a thread that copies, what has a copy under way waits for the end of a step, too.
        """
        if self._lock.acquire(False):
            try:
                if saved.num_handles == 0:  # else another thread packed the storage once more
                    # Few have a copy left to wait for, so the device is seldom asked.
                    if (saved.pending is not None or saved.emptied is not None) and self._is_copy_thread():
                        self._dropped.append(saved)
                    else:
                        self._retire(saved)
            except KeyboardInterrupt:  # a destructor swallows it: the next step tries again
                self._dropped.append(saved)
                raise
            finally:
                self._lock.release()
        else:
            self._dropped.append(saved)
        if self._dropped:  # the step, in whatever thread, may have looked there before
            self._retire_dropped()

    @abstractmethod
    def _retire(self, saved: SavedStorage) -> None:
        """Give back everything that `saved` has. No-op for a storage that is gone."""

    def _retire_dropped(self) -> None:
        """Retire what autograd has dropped, unless a step is under way: its end does that."""
        while self._dropped and not self._is_copy_thread() and self._lock.acquire(blocking=False):
            try:
                while self._dropped:
                    saved = self._dropped.popleft()
                    if saved.num_handles == 0:  # else the step packed the storage once more
                        try:
                            self._retire(saved)
                        except KeyboardInterrupt:
                            self._dropped.append(saved)
                            raise
            finally:
                self._lock.release()
