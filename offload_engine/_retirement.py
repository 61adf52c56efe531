"""When a storage retires whose last handle autograd has dropped: between two steps of the store, never in one."""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from offload_engine._saved import SavedStorage

_Store = TypeVar("_Store", bound="Retirement")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Retirement(ABC):
    """What a store needs so that nothing it works on goes under its hands.

    The last handle may go at any time: the garbage collector finds graphs in cycles, in the middle of a step and in any
    thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held during a step
        self._dropped: deque[SavedStorage] = deque()  # without a handle, not retired yet

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


def undisturbed(
    step: Callable[Concatenate[_Store, _Arguments], _Result],
) -> Callable[Concatenate[_Store, _Arguments], _Result]:
    """One step of the store, in the middle of which no storage retires; what autograd drops meanwhile retires after."""

    @functools.wraps(step)
    def undisturbed_step(store: _Store, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            with store._lock:
                return step(store, *args, **kwargs)
        finally:
            if store._dropped:
                store._retire_dropped()

    return undisturbed_step
