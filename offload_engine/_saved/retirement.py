"""`RetireQueue`: retires storages after autograd has dropped their last handle."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from offload_engine._host.try_lock import run_if_free
from offload_engine._saved.storage import SavedStorage


class RetireQueue:
    """Defers retirement: a storage whose last handle goes during an operation of the store is retired after it.

    The last handle may be dropped at any time: the garbage collector frees graphs in cycles, in the middle of an
    operation and in any thread. So an operation of the store runs under `with queue, queue.lock`: nothing is retired
    inside `lock`, and entering and leaving the queue call `drain`.

    Nothing is retired in a thread that copies, where the collector may run as well: retiring waits for a copy in
    flight, and the thread might wait for itself. The next operation that ends in another thread does it.

    Operations use `with lock`: with separate calls, an interrupt between two lines could leave the lock held.

    Python drops what a destructor raises, and an interrupt may come in the destructor of a handle: in a backward that
    runs in the main thread, these are often the first lines of Python for a long time. `reclaim` raises it.

    Args:
        is_copy_thread: returns True in a thread that copies.
        retire: releases all memory of a storage, and may be called again; never called while an operation holds `lock`.

    Attributes:
        lock: held during an operation.
        dropped: storages without a handle that are not retired yet.
    """

    def __init__(self, is_copy_thread: Callable[[], bool], retire: Callable[[SavedStorage], None]) -> None:
        self.lock: Any = threading.RLock()
        self._is_copy_thread = is_copy_thread
        self._retire = retire
        self.dropped: deque[SavedStorage] = deque()
        self._is_interrupted: bool = False

    def __enter__(self) -> RetireQueue:
        if self.dropped:
            self.drain()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.dropped:
            self.drain()

    def retire(self, saved: SavedStorage) -> None:
        """Retire a storage whose last handle was dropped, now or with the next operation; for destructors."""
        self.dropped.append(saved)
        if saved.buffer is None and saved.emptied is None:
            return  # it has no device bytes: the next operation retires it, together with others
        try:
            self.drain()
        except KeyboardInterrupt:
            self._is_interrupted = True

    def drain(self) -> None:
        """Retire the dropped storages, unless an operation is running, which drains at its end."""
        # Again, because the operation that held the lock may have drained before the last one was dropped.
        while self.dropped and not self._is_copy_thread() and run_if_free(self.lock, self._retire_dropped):
            pass

    def reclaim(self, live: Iterable[SavedStorage]) -> None:
        """Retire the storages among `live` whose handles are gone although no destructor has said so.

        Raises:
            KeyboardInterrupt: if one has come in a destructor.
        """
        with self.lock:
            lost = [saved for saved in live if saved.has_lost_handles()]
            for saved in lost:
                saved.handles.clear()
                self.dropped.append(saved)
        self.drain()
        if lost or self._is_interrupted:
            self._is_interrupted = False
            raise KeyboardInterrupt("it came while a saved tensor was freed, where Python drops it")

    def _retire_dropped(self) -> None:
        while self.dropped:
            saved = self.dropped[0]  # stays in the queue if an interrupt ends its retirement
            try:
                if not saved.handles:  # otherwise it has been packed again
                    self._retire(saved)
            except Exception:
                self.dropped.popleft()
                raise
            self.dropped.popleft()
