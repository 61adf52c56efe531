"""Host bytes lent to storages that are on host.

The pool obtains large slabs from the device and lends ranges of them. A returned range may still be read by a copy-in,
so it is returned with events, and the next lease of any of these bytes carries them: the copy-out into it waits for
them (rule 2 of `_saved/transfers.py`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from offload_engine._devices.base import CopyError, Device, Event, HostSlab
from offload_engine._devices.regions import HostRegion
from offload_engine._host.extents import Extent, FreeExtents
from offload_engine._host.try_lock import run_if_free
from offload_engine._host.unawaited import UnawaitedCopies

MIB = 1 << 20
_GROWTH_DIVISOR = 16
"""A new slab is at least this fraction of the pool: large compared to its storages, so that little is lost at its end,
and small enough that the last slab overshoots the peak by little."""

DEFAULT_SHARE = 0.8
"""Without a limit, whenever the pool grows, it holds at most this share of its own bytes plus the free bytes of the
host tier. So processes that grow side by side leave each other room, memory taken by others is respected, and VMs that
grow on demand (ballooning) can be used fully."""

_WASTE_TOLERATED = 1.08
"""Slabs are replaced by one if their bytes exceed this multiple of the peak ever lent."""

_CONSOLIDATION_HEADROOM = 1 / 32
"""The replacing slab is larger than the peak by this fraction: sizes that change from step to step leave holes."""

_PEAK_GROWTH_BETWEEN_CONSOLIDATIONS = 1.25
"""Obtaining slabs is slow (0.1 to 0.6 s per GiB when pinned): replace them again only after the peak grew by this."""


class HostLease:
    """Host bytes lent until `HostPool.give_back`.

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

    `give_back` may be called at any time, also by the garbage collector in the middle of another call of this pool
    or from another thread: it then only queues the lease, and the call in progress processes it.

    Args:
        device: where slabs come from.
        limit_bytes: the pool never holds more slab bytes than this; None: `DEFAULT_SHARE` of what is free.
        slab_bytes: smallest slab to ask for at first, where the limit allows it.
        unawaited: copy-ins whose bytes are lent last; None: there are none.

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
        self._device = device
        self._alignment: int = device.host_alignment
        self._limit_bytes = limit_bytes
        self._slab_bytes = slab_bytes
        self._unawaited = UnawaitedCopies() if unawaited is None else unawaited
        self._free = FreeExtents(device.is_complete, self._unawaited)
        self._slabs: dict[int, HostSlab] = {}
        self._next_slab = 0
        self._lock: Any = threading.RLock()
        self._returns: deque[tuple[HostLease, Sequence[Event]]] = deque()
        self._closed = False
        self._age = 0  # of the books
        self._peak_ever = 0
        self._peak_at_consolidation = 0
        self.lent_bytes = 0
        self.peak_lent_bytes = 0
        self.slab_bytes_total = 0
        self.num_leases = 0

    @property
    def room_bytes(self) -> int:
        """Return the most bytes that one lease could get now."""
        self._settle()
        with self._lock:
            largest = max((extent.nbytes for extent in self._free), default=0)
            return max(largest, self._room())

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
        if self._returns:
            self._settle()
        with self._lock:
            lease = self._lend(nbytes)
        if self._returns:  # queued by the garbage collector while the lock was held
            self._settle()
        return lease

    def give_back(self, lease: HostLease, events: Sequence[Event] = ()) -> None:
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
        self._settle()

    def take_all_back(self) -> None:
        """Take back all that is lent, and drop all returned events; call it when no copy is in flight.

        For recovery. The event of a failed copy never completes, and the next user of the bytes would raise an error
        that is not its own. And an interrupt may have lost a lease, so this does not undo the books: it makes new ones.
        A lease from before has no bytes any more, and its return has no effect.
        """
        with self._lock:
            free = FreeExtents(self._device.is_complete, self._unawaited)
            for index, slab in self._slabs.items():
                free.put(index, 0, slab.nbytes)
            self._free, self._returns = free, deque()
            self.slab_bytes_total = sum(slab.nbytes for slab in self._slabs.values())
            self.lent_bytes = self.num_leases = 0
            self._age += 1

    def reset_peak(self) -> None:
        """Restart `peak_lent_bytes` from the bytes lent now."""
        self._settle()
        self._peak_ever = max(self._peak_ever, self.peak_lent_bytes)
        self.peak_lent_bytes = self.lent_bytes

    def trim(self) -> int:
        """Close the slabs that are entirely free and that no copy reads.

        Returns:
            Number of bytes returned to the system.
        """
        self._settle()
        with self._lock:
            return sum(self._close_slab(extent) for extent in self._idle_slabs())

    def close(self) -> None:
        """Wait for the copies that still read free bytes, then close every slab. Idempotent.

        Raises:
            RuntimeError: if leases are out; no slab is closed then.
        """
        self._settle()
        if self.num_leases:
            raise RuntimeError(
                f"host pool closed with {self.num_leases} leases ({self.lent_bytes:,} bytes) out. "
                "Finish the iteration or call reset_iteration() first."
            )
        with self._lock:
            self._closed = True
            for extent in list(self._free):
                self._wait_for(extent)
                self._close_slab(extent)

    def _settle(self) -> None:
        """Process the queued returns, unless a call in progress holds the lock and processes them at its end."""
        while self._returns and run_if_free(self._lock, self._take_returns):
            pass

    def _take_returns(self) -> None:
        while self._returns:
            self._take_back(*self._returns.popleft())

    def _take_back(self, lease: HostLease, events: Sequence[Event]) -> None:
        self._free.put(lease._slab, lease.region.offset, lease._extent_bytes, events)
        self.lent_bytes -= lease.region.nbytes
        self.num_leases -= 1

    def _lend(self, nbytes: int) -> HostLease | None:
        if self._closed:
            raise RuntimeError("the host pool has been closed")
        if not self.num_leases:
            self._consolidate()
        need = self._round_up(nbytes)
        taken = self._free.take(need)
        if taken is None and self._grow(need):
            taken = self._free.take(need)
        if taken is None:
            return None
        self.num_leases += 1
        self.lent_bytes += nbytes
        if self.lent_bytes > self.peak_lent_bytes:
            self.peak_lent_bytes = self.lent_bytes
        region = HostRegion(self._slabs[taken.slab], taken.start, nbytes)
        return HostLease(self, taken.slab, need, region, taken.events)

    def _round_up(self, nbytes: int) -> int:
        return (nbytes + self._alignment - 1) & -self._alignment

    def _grow(self, need: int) -> bool:
        """Add a slab with room for `need` bytes; return False if limit or host tier do not allow it."""
        if not self._make_room(need):
            return False
        # After the first step, or once slabs were replaced, little is missing: no minimum size.
        smallest = 0 if self._peak_ever or self._peak_at_consolidation else self._slab_bytes
        wanted = self._round_up(max(need, smallest, self.slab_bytes_total // _GROWTH_DIVISOR))
        room = self._room()
        if room < need:  # other processes have taken memory meanwhile
            return False
        wanted = min(wanted, room)
        if self._add_slab(wanted) or (wanted > need and self._add_slab(need)):
            return True
        closed = [self._close_slab(extent) for extent in self._idle_slabs()]  # the tier may be full of idle slabs
        return bool(closed) and self._add_slab(need)

    def _consolidate(self) -> None:
        """Replace slabs that waste too much by one large slab, while nothing is lent.

        A pool that grew storage by storage loses the end of each slab, up to half of it if storages are about as large
        as slabs. One slab of the size of the peak has one end.
        """
        peak = max(self._peak_ever, self.peak_lent_bytes)
        wasteful = len(self._slabs) > 1 and self.slab_bytes_total > _WASTE_TOLERATED * peak
        if not wasteful or peak < _PEAK_GROWTH_BETWEEN_CONSOLIDATIONS * self._peak_at_consolidation:
            return
        idle = self._idle_slabs()
        if len(idle) < len(self._slabs):  # copies are still reading: the next iteration will do
            return
        for extent in idle:
            self._close_slab(extent)
        self._peak_at_consolidation = peak
        wanted = self._round_up(int(peak * (1 + _CONSOLIDATION_HEADROOM)))
        if room := min(wanted, self._room()):
            self._add_slab(room)  # if that fails, the pool grows step by step again

    def _room(self) -> int:
        """Return how many more slab bytes the limit allows."""
        limit = self._limit_bytes
        if limit is None:
            limit = int(DEFAULT_SHARE * (self.slab_bytes_total + self._device.free_host_bytes()))
        return max(0, limit - self.slab_bytes_total) & -self._alignment

    def _make_room(self, need: int) -> bool:
        """Close as few idle slabs as needed to add `need` bytes; each is too small, or it would have been lent."""
        short = need - self._room()
        if short <= 0:
            return True
        idle = self._idle_slabs()
        if sum(extent.nbytes for extent in idle) < short:
            return False
        for extent in idle:
            if self._room() < need:
                self._close_slab(extent)
        return True

    def _add_slab(self, nbytes: int) -> bool:
        try:
            slab = self._device.new_slab(nbytes)
        except MemoryError:
            return False
        index = self._next_slab
        self._next_slab += 1
        self._slabs[index] = slab
        self.slab_bytes_total += nbytes
        self._free.put(index, 0, nbytes)
        return True

    def _idle_slabs(self) -> list[Extent]:
        """Return the slabs that are one free extent without pending events, smallest first."""
        return [
            extent
            for extent in self._free
            if extent.nbytes == self._slabs[extent.slab].nbytes and not self._free.pending_events(extent)
        ]

    def _close_slab(self, extent: Extent) -> int:
        self._free.remove(extent)
        self._slabs.pop(extent.slab).close()
        self.slab_bytes_total -= extent.nbytes
        return extent.nbytes

    def _wait_for(self, extent: Extent) -> None:
        for event in self._free.pending_events(extent):
            with suppress(CopyError):  # a failed copy no longer touches the bytes, and was reported already
                self._device.synchronize(event)
