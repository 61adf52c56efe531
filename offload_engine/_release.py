"""When the device bytes of copied-out groups are released."""

from __future__ import annotations

from collections import deque

from offload_engine._devices.base import Device
from offload_engine._store import ActivationStore, CopyOut


class ReleaseQueue:
    """Groups with a copy-out issued, oldest first.

    A group whose copy has completed is released at the next group boundary. Beyond `max_inflight_bytes`, or
    `max_inflight_groups`, of unreleased copies the compute stream is made to wait for the oldest: that is the
    back-pressure, and it never blocks a host that runs ahead of its device.
    """

    def __init__(
        self, store: ActivationStore, device: Device, max_inflight_bytes: int | None, max_inflight_groups: int | None
    ) -> None:
        self._store = store
        self._device = device
        self._max_inflight_bytes = max_inflight_bytes
        self._max_inflight_groups = max_inflight_groups
        self._largest_bytes = 0
        self._queue: deque[CopyOut] = deque()
        self._inflight_bytes = 0

    def push(self, issued: CopyOut) -> None:
        """Queue a copy-out that was just issued."""
        self._queue.append(issued)
        self._inflight_bytes += issued.nbytes
        self._largest_bytes = max(self._largest_bytes, issued.nbytes)

    def advance(self) -> None:
        """Release what has been copied out, and as many more as the limit on copies in flight asks for."""
        while self._queue and (self._is_over_limit() or self._device.is_complete(self._queue[0].copied_out)):
            self._release_oldest()

    def drain(self) -> None:
        """Release everything."""
        while self._queue:
            self._release_oldest()

    def clear(self) -> None:
        """Forget everything, after the store has abandoned it."""
        self._queue.clear()
        self._inflight_bytes = 0

    def _is_over_limit(self) -> bool:
        limit = 2 * self._largest_bytes if self._max_inflight_bytes is None else self._max_inflight_bytes
        if self._inflight_bytes > limit:
            return True
        return self._max_inflight_groups is not None and len(self._queue) > self._max_inflight_groups

    def _release_oldest(self) -> None:
        oldest = self._queue.popleft()
        self._inflight_bytes -= oldest.nbytes
        self._store.release(oldest.storages)
