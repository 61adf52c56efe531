# SPDX-License-Identifier: Apache-2.0
"""Host bytes lent to storages that are on host.

The pool obtains large slabs from the device and lends ranges of them. A returned range may still be read by a copy-in,
so it is returned with events. The next lease of any of these bytes carries them, and the copy-out into it waits for
them (rule 2 of `_saved/transfers.py`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from offload_engine._devices.base import Device, Event
from offload_engine._devices.regions import HostRegion
from offload_engine._host.slabs import HostSlabs
from offload_engine._host.unawaited import UnawaitedCopies
from offload_engine.counted import counted
from offload_engine.errors import OffloadError

MIB = 1 << 20
_WASTE_TOLERATED = 1.08
"""Slabs are replaced by one if their bytes exceed this multiple of the peak ever lent."""

_CONSOLIDATION_HEADROOM = 1 / 32
"""The replacing slab is larger than the peak by this fraction: sizes that change from step to step leave holes."""

_PEAK_GROWTH_BETWEEN_CONSOLIDATIONS = 1.25
"""Obtaining slabs is slow (0.1 to 0.6 s per GiB when pinned): replace them again only after the peak grew by this."""


class HostLease:
    """Host bytes lent until `HostPool.return_lease`.

    Attributes:
        region: exactly the requested bytes.
        ready_after: events of earlier users of these bytes; a copy-out waits for all of them before the first byte.
    """

    __slots__ = ("region", "ready_after", "_pool", "_slab", "_extent_bytes", "_age", "__weakref__")

    def __init__(
        self, pool: HostPool, slab: int, extent_bytes: int, region: HostRegion, ready_after: tuple[Event, ...]
    ) -> None:
        self.region = region
        self.ready_after = ready_after
        self._pool: HostPool | None = pool  # None once returned
        self._slab = slab
        self._extent_bytes = extent_bytes
        self._age = pool._age

    def __repr__(self) -> str:
        state = "returned" if self._pool is None else "lent"
        where = f"slab {self._slab} at {self.region.offset:,}"
        return f"HostLease({self.region.nbytes:,} bytes, {where}, {state}, {len(self.ready_after)} events)"


class HostPool:
    """Lends host bytes of a device, within a limit.

    `return_lease` may be called at any time, also by the garbage collector in the middle of another call of this pool
    or from another thread: it only queues the lease, for the next call that needs to know.

    Args:
        device: where slabs come from.
        limit_bytes: the pool never holds more slab bytes than this; None: a share of what is free (`HostSlabs`).
        slab_bytes: smallest slab to ask for at first, where the limit allows it.
        unawaited: copy-ins whose bytes are lent last; None: there are none.

    Attributes:
        alignment: of the bytes lent, in bytes.
        peak_lent_bytes: the most that were lent at once since `reset_peak`.

    Raises:
        ValueError: if the limit is negative or the slab size is not positive.
    """

    def __init__(
        self,
        device: Device,
        limit_bytes: int | None = None,
        slab_bytes: int = 64 * MIB,
        unawaited: UnawaitedCopies | None = None,
    ) -> None:
        if limit_bytes is not None and limit_bytes < 0:
            raise ValueError(f"limit_bytes must not be negative, got {limit_bytes:,}")
        if slab_bytes <= 0:
            raise ValueError(f"slab_bytes must be positive, got {slab_bytes:,}")
        self._slabs = HostSlabs(device, limit_bytes, UnawaitedCopies() if unawaited is None else unawaited)
        self.alignment: int = device.host_alignment
        self._slab_bytes = slab_bytes
        self._lock: Any = threading.RLock()
        self._returns: deque[tuple[HostLease, Sequence[Event]]] = deque()
        self._closed = self._is_frozen = False
        self._age = 0  # of the books
        self._peak_ever = 0
        self._peak_at_consolidation = 0
        self._lent_bytes = 0
        self.peak_lent_bytes = 0
        self._num_leases = 0

    @property
    def lent_bytes(self) -> int:
        """Return the bytes that are lent now."""
        self._drain()
        return self._lent_bytes

    @property
    def num_leases(self) -> int:
        """Return the number of leases that are not returned yet."""
        self._drain()
        return self._num_leases

    @property
    def slab_bytes_total(self) -> int:
        """Return the total bytes of the slabs, lent or not."""
        return self._slabs.nbytes

    def spare(self, nbytes: int) -> None:
        """Spare `nbytes` of the free host memory for other code of the process, unless there is a limit."""
        self._slabs.spared_bytes = nbytes

    @property
    def room_bytes(self) -> int:
        """Return the size in bytes of the largest lease that is possible now."""
        self._drain()
        with self._lock:
            largest = max((extent.nbytes for extent in self._slabs.free), default=0)
            return max(largest, self._slabs.room())

    def lend(self, nbytes: int) -> HostLease | None:
        """Lend `nbytes` bytes.

        Returns:
            The lease, or None if the limit is reached or the host tier is full.

        Raises:
            ValueError: if `nbytes` is not positive.
            RuntimeError: if the pool has been closed.
        """
        if nbytes <= 0:
            raise ValueError(f"a lease needs at least one byte, got {nbytes}")
        with self._lock:
            self._drain_locked()
            return self._lend(nbytes)

    def return_lease(self, lease: HostLease, events: Sequence[Event] = ()) -> None:
        """Return a lease; its bytes may be lent again at once, together with `events`.

        Raises:
            AssertionError: if the lease has been returned before, or belongs to another pool.
        """
        if lease._pool is not self:
            reason = "returned twice" if lease._pool is None else "returned to a pool that did not lend it"
            raise AssertionError(f"{lease!r} was {reason}")
        lease._pool = None
        if lease._age != self._age:
            return
        self._returns.append((lease, events))

    def reset(self) -> None:
        """Start new books, in which nothing is lent and no event is pending; call it when no copy is in flight.

        For recovery. The event of a failed copy never completes, and the next user of the bytes would raise an error
        that is not its own. An interrupt may also have lost a lease, or left the lock held, so the old books are not
        corrected. A lease from before has no bytes any more, and its return has no effect.
        """
        self._age += 1
        self._lock = threading.RLock()
        self._returns = deque()
        self._slabs.reset()
        self._lent_bytes = self._num_leases = 0

    def freeze(self) -> None:
        """Stop obtaining and closing slabs: no memory can be pinned while a CUDA graph is captured.

        Forgets the copies that read free bytes; call it when none is in flight, and nothing is lent.
        """
        self._drain()
        with self._lock:
            self._consolidate()
            self._slabs.free.forget_events()
            self._is_frozen = True

    def thaw(self) -> None:
        """Resume obtaining and closing slabs. Idempotent."""
        self._is_frozen = False

    def hand_over(self) -> HostSlabs:
        """Hand all slabs over to the caller, while nothing is lent, and continue without any."""
        self._drain()
        with self._lock:
            slabs, self._slabs = self._slabs, self._slabs.successor()
        return slabs

    def books_beside(self) -> HostSlabs:
        """Return separate books without slabs, limited to what this pool's limit leaves now; see `set_aside`."""
        self._drain()
        with self._lock:
            self._slabs.close_idle()
            return self._slabs.successor()

    def set_aside(self, slabs: HostSlabs) -> None:
        """Count the slabs of books from `books_beside` against this pool's limit."""
        with self._lock:
            self._slabs.aside_bytes += slabs.nbytes

    def take_over(self, slabs: HostSlabs) -> None:
        """Take over slabs that were handed over or set aside; no copy may be in flight in them."""
        with self._lock:
            self._slabs.take_over(slabs)

    def reset_peak(self) -> None:
        """Restart `peak_lent_bytes` from the bytes lent now."""
        self._drain()
        self._peak_ever = max(self._peak_ever, self.peak_lent_bytes)
        self.peak_lent_bytes = self._lent_bytes

    def trim(self) -> int:
        """Close the slabs that are entirely free and that no copy reads.

        Returns:
            Number of bytes returned to the system.
        """
        self._drain()
        with self._lock:
            return self._slabs.close_idle()

    def close(self) -> None:
        """Wait for the copies that still read free bytes, then close every slab. Idempotent.

        Raises:
            RuntimeError: if leases are not returned; no slab is closed then.
        """
        self._drain()
        if self._num_leases:
            raise RuntimeError(
                f"host pool closed with {counted(self._num_leases, 'lease')} ({self._lent_bytes:,} bytes) not "
                "returned. Finish the iteration or call reset_iteration() first."
            )
        with self._lock:
            self._closed = True
            self._slabs.close_free()

    def _drain(self) -> None:
        with self._lock:
            self._drain_locked()

    def _drain_locked(self) -> None:
        while self._returns:
            lease, events = self._returns.popleft()
            self._process_return(lease, events)

    def _process_return(self, lease: HostLease, events: Sequence[Event]) -> None:
        self._slabs.free.put(lease._slab, lease.region.offset, lease._extent_bytes, events)
        self._lent_bytes -= lease.region.nbytes
        self._num_leases -= 1

    def _lend(self, nbytes: int) -> HostLease | None:
        if self._closed:
            raise RuntimeError("the host pool has been closed")
        if not self._num_leases and not self._is_frozen:
            self._consolidate()
        slabs = self._slabs
        need = slabs.round_up(nbytes)
        taken = slabs.free.take(need)
        if taken is None and self._grow(need):
            taken = slabs.free.take(need)
        if taken is None:
            return None
        self._num_leases += 1
        self._lent_bytes += nbytes
        if self._lent_bytes > self.peak_lent_bytes:
            self.peak_lent_bytes = self._lent_bytes
        region = HostRegion(slabs.by_index[taken.slab], taken.start, nbytes)
        return HostLease(self, taken.slab, need, region, taken.events)

    def _grow(self, need: int) -> bool:
        slabs = self._slabs
        if not self._is_frozen:
            return slabs.grow(need, self._smallest_slab())
        if slabs.room() < need:  # as in the steps before
            return False
        raise OffloadError(
            f"the captured step needs {need:,} bytes of host memory more than the {slabs.nbytes:,} that are pinned, "
            "and none can be pinned in a capture. Run one more step like it before the capture."
        )

    def _smallest_slab(self) -> int:
        # No minimum size after the first step, or once slabs were replaced: little is missing then.
        return 0 if self._peak_ever or self._peak_at_consolidation else self._slab_bytes

    def _consolidate(self) -> None:
        """Replace slabs that waste too much by one large slab, while nothing is lent.

        A pool that grew storage by storage loses the end of each slab, up to half of it if storages are about as large
        as slabs. One slab of the size of the peak loses one end.
        """
        peak = max(self._peak_ever, self.peak_lent_bytes)
        slabs = self._slabs
        wasteful = len(slabs.by_index) > 1 and slabs.nbytes > _WASTE_TOLERATED * peak
        if not wasteful or peak < _PEAK_GROWTH_BETWEEN_CONSOLIDATIONS * self._peak_at_consolidation:
            return
        if slabs.replace_by_one(int(peak * (1 + _CONSOLIDATION_HEADROOM))):  # else the next iteration tries again
            self._peak_at_consolidation = peak
