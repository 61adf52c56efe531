"""When the device bytes of copied-out groups are released."""

from __future__ import annotations

from collections import deque

from offload_engine._devices.base import Device
from offload_engine._saved.storage import TensorGroup
from offload_engine._saved.store import ActivationStore, CopyOut
from offload_engine.schedule import ChunkKey


class ReleaseQueue:
    """Groups with a copy-out issued, oldest first.

    A group whose copy has completed is released at the next group boundary. Beyond `max_inflight_bytes`, or
    `max_inflight_groups`, of unreleased copies the compute stream is made to wait for the oldest: that is the
    back-pressure, and it never blocks a host that runs ahead of its device.

    Where the backward of one chunk begins behind the forward of another, memory has its peak. What that forward copied
    out before its tail is released there: the wait costs little, for the tail took about as long as the copies. Where
    somebody has set the limit, it means what it says: nobody waits there as long as it holds.

    Where resident bytes have a limit of their own (`Accounts.resident_limit_bytes`), that alone decides: nothing
    is released before it has to be, for what is still there when the backward begins need not come back.
    """

    def __init__(
        self, store: ActivationStore, device: Device, max_inflight_bytes: int | None, max_inflight_groups: int | None
    ) -> None:
        self._store = store
        self._accounts = store.accounts
        self._device = device
        self._max_inflight_bytes = max_inflight_bytes
        self._max_inflight_groups = max_inflight_groups
        self.largest_bytes: int = 0
        self.inflight_bytes: int = 0
        self._queue: deque[CopyOut] = deque()
        self._num_before_tail: int = 0  # how many of them, the oldest, are older than the tail of the last forward

    def push(self, issued: CopyOut) -> None:
        """Queue a copy-out that was just issued."""
        self._queue.append(issued)
        self.inflight_bytes += issued.nbytes
        if issued.nbytes > self.largest_bytes:
            self.largest_bytes = issued.nbytes

    def advance(self) -> None:
        """Release what has been copied out, and as many more as the limit on copies in flight asks for."""
        if not self._queue:
            return
        if self._accounts.resident_limit_bytes is not None:
            while self._queue and not self.has_resident_room:
                self._release_oldest()
            return
        while self._queue and (self._is_over_limit() or self._device.is_complete(self._queue[0].copied_out)):
            self._release_oldest()

    def begin_tail(self) -> None:
        """A computation begins that ends the forward, and takes longer than the copies issued so far."""
        self._num_before_tail = len(self._queue)

    def end_tail(self, chunk: ChunkKey) -> None:
        """The backward of `chunk` begins, behind a tail if there was one: release what others copied out before that.

        Idempotent.
        """
        if self._max_inflight_bytes is not None or self._accounts.resident_limit_bytes is not None:
            return
        while self._num_before_tail and self._queue[0].group.chunk != chunk:
            self._release_oldest()

    def release_layer_before(self, kept: TensorGroup) -> None:
        """What left before the group of the same name as `kept` a layer earlier, and that one, is off the device now.

        It has had the time of a layer. Else the last layer takes its memory from elsewhere, and that stays reserved.
        """
        if self._accounts.resident_limit_bytes is not None:
            return
        num_older = 0
        for number, copy in enumerate(self._queue, 1):
            group = copy.group
            if group.name == kept.name and (group.chunk != kept.chunk or group.layer < kept.layer):
                num_older = number
        for _ in range(num_older):
            self._release_oldest()

    def before_peak(self) -> None:
        """A chunk is about to turn around: what was copied out before is off the device by then."""
        if self._accounts.resident_limit_bytes is None:
            self.drain()

    def drain(self) -> None:
        """Release everything."""
        while self._queue:
            self._release_oldest()

    def clear(self) -> None:
        """Forget everything, after the store has abandoned it."""
        self._queue.clear()
        self.inflight_bytes = self._num_before_tail = 0

    def has_room_to_wait(self, nbytes: int) -> bool:
        """True if so many bytes may wait to be copied: no more than half of what may be in flight, and all within it.

        So nobody is made to wait for a copy because that was issued late.
        """
        if self._max_inflight_groups is not None:
            return False
        return 2 * nbytes <= self._limit_bytes and self.inflight_bytes + nbytes <= self._limit_bytes

    @property
    def has_resident_room(self) -> bool:
        """True if another group, as large as the largest, fits within the limit of resident bytes."""
        return self._accounts.has_resident_room(self.largest_bytes)

    @property
    def _limit_bytes(self) -> int:
        return 2 * self.largest_bytes if self._max_inflight_bytes is None else self._max_inflight_bytes

    def _is_over_limit(self) -> bool:
        if self.inflight_bytes > self._limit_bytes:
            return True
        return self._max_inflight_groups is not None and len(self._queue) > self._max_inflight_groups

    def _release_oldest(self) -> None:
        oldest = self._queue.popleft()
        self.inflight_bytes -= oldest.nbytes
        if self._num_before_tail:
            self._num_before_tail -= 1
        self._store.release(oldest.storages)
