"""When a storage retires whose last handle autograd has dropped: between two steps of the store, never in one."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from types import TracebackType

from offload_engine._saved import SavedStorage


class Retirement(ABC):
    """What a store needs so that nothing it works on goes under its hands.

    The last handle may go at any time: the garbage collector finds graphs in cycles, in the middle of a step and in any
    thread. So a step is `with self, self._lock`, not reentrant. In the middle of it no storage retires; what autograd
    drops meanwhile retires when the store, as a context manager, is left, behind the lock.

    The lock is taken and given back by its own `with`: between two lines of ours an interrupt could leave it taken.
    """

    def __init__(self) -> None:
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
        """Autograd has dropped the last handle: give everything back, where a step is under way after it."""
        if self._lock.acquire(False):
            try:
                if saved.num_handles == 0:  # else another thread packed the storage once more
                    self._retire(saved)
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
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                while self._dropped:
                    saved = self._dropped.popleft()
                    if saved.num_handles == 0:  # else the step packed the storage once more
                        self._retire(saved)
            finally:
                self._lock.release()
