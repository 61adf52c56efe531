# SPDX-License-Identifier: Apache-2.0
"""`HostSlabs`: the memory of a host pool, obtained from the device within a limit."""

from __future__ import annotations

from contextlib import suppress

from offload_engine._devices.base import CopyError, Device, HostSlab
from offload_engine._host.extents import Extent, FreeExtents
from offload_engine._host.unawaited import UnawaitedCopies

_GROWTH_DIVISOR = 16
"""A new slab is at least this fraction of the pool: large compared to its storages, so that little is lost at its end,
and small enough that the last slab overshoots the peak by little."""

DEFAULT_SHARE = 0.8
"""Without a limit, whenever the pool grows, it holds at most this share of its own bytes plus the free bytes of the
host tier, of which each process of a node has its share. Memory taken by others is respected, and VMs that grow on
demand (ballooning) can be used fully."""


class HostSlabs:
    """Owns the slabs of a host pool and the list of their free bytes. Its callers hold the pool's lock.

    Args:
        device: where slabs come from.
        limit_bytes: the slabs never have more bytes than this; None: `DEFAULT_SHARE` of what is free.
        unawaited: copy-ins whose bytes are lent last.

    Attributes:
        by_index: the open slabs, by the index that extents have.
        free: the bytes that are not lent.
        nbytes: of all slabs.
        spared_bytes: free host bytes that this object leaves alone, if there is no limit.
        aside_bytes: slab bytes of other objects that count against this limit.
    """

    def __init__(self, device: Device, limit_bytes: int | None, unawaited: UnawaitedCopies) -> None:
        self.by_index: dict[int, HostSlab] = {}
        self.free: FreeExtents = FreeExtents(device.is_complete, unawaited)
        self.nbytes: int = 0
        self.spared_bytes: int = 0
        self.aside_bytes: int = 0
        self._device = device
        self._alignment: int = device.host_alignment
        self._limit_bytes = limit_bytes
        self._unawaited = unawaited
        self._next_index = 0

    def round_up(self, nbytes: int) -> int:
        """Return the bytes that `nbytes` take in a slab."""
        return (nbytes + self._alignment - 1) & -self._alignment

    def room(self) -> int:
        """Return how many bytes of slabs the limit still allows."""
        limit, own = self._limit_bytes, self.nbytes + self.aside_bytes
        if limit is None:
            limit = int(DEFAULT_SHARE * (own + self._device.free_host_bytes() - self.spared_bytes))
        return max(0, limit - own) & -self._alignment

    def grow(self, need: int, smallest: int) -> bool:
        """Add a slab with room for `need` bytes; return False if the limit or the host tier does not allow it.

        Args:
            need: rounded up.
            smallest: bytes of the slab, where the limit allows it.
        """
        if not self._make_room(need):
            return False
        wanted = self.round_up(max(need, smallest, self.nbytes // _GROWTH_DIVISOR))
        room = self.room()
        if room < need:  # other processes have taken memory in between
            return False
        wanted = min(wanted, room)
        if self._add(wanted) or (wanted > need and self._add(need)):
            return True
        return bool(self.close_idle()) and self._add(need)  # the tier may be full of idle slabs

    def replace_by_one(self, nbytes: int) -> bool:
        """Replace all slabs by one, within the limit; return False, without effect, while copies read them."""
        idle = self._idle()
        if len(idle) < len(self.by_index):
            return False
        for extent in idle:
            self._close(extent)
        if room := min(self.round_up(nbytes), self.room()):
            self._add(room)  # if that fails, the pool grows step by step again
        return True

    def reset(self) -> None:
        """Start new books, in which all bytes are free and no copy reads them."""
        free = FreeExtents(self._device.is_complete, self._unawaited)
        for index, slab in self.by_index.items():
            free.put(index, 0, slab.nbytes)
        self.free = free
        self.nbytes = sum(slab.nbytes for slab in self.by_index.values())

    def successor(self) -> HostSlabs:
        """Return new books without slabs; the slabs of this object count against their limit."""
        successor = HostSlabs(self._device, self._limit_bytes, self._unawaited)
        successor.spared_bytes, successor.aside_bytes = self.spared_bytes, self.nbytes + self.aside_bytes
        return successor

    def take_over(self, predecessor: HostSlabs) -> None:
        """Take over the slabs of another object, already counted against this limit; none is lent or being copied."""
        self.aside_bytes -= predecessor.nbytes
        for slab in predecessor.by_index.values():
            self._put(slab)

    def close_idle(self) -> int:
        """Close the slabs that are entirely free and that no copy reads; return their bytes."""
        return sum([self._close(extent) for extent in self._idle()])

    def close_free(self) -> None:
        """Wait for the copies that still read free bytes, then close the slabs. Nothing may be lent."""
        for extent in list(self.free):
            self._wait_for(extent)
            self._close(extent)

    def _make_room(self, need: int) -> bool:
        """Close as few idle slabs as needed to add `need` bytes; each is too small to be lent instead."""
        short = need - self.room()
        if short <= 0:
            return True
        idle = self._idle()
        if sum(extent.nbytes for extent in idle) < short:
            return False
        for extent in idle:
            if self.room() < need:
                self._close(extent)
        return True

    def _add(self, nbytes: int) -> bool:
        try:
            self._put(self._device.new_slab(nbytes))
        except MemoryError:
            return False
        return True

    def _put(self, slab: HostSlab) -> None:
        index = self._next_index
        self._next_index += 1
        self.by_index[index] = slab
        self.nbytes += slab.nbytes
        self.free.put(index, 0, slab.nbytes)

    def _idle(self) -> list[Extent]:
        """Return the slabs that are one free extent without pending events, smallest first."""
        return [
            extent
            for extent in self.free
            if extent.nbytes == self.by_index[extent.slab].nbytes and not self.free.pending_events(extent)
        ]

    def _close(self, extent: Extent) -> int:
        self.free.remove(extent)
        self.by_index.pop(extent.slab).close()
        self.nbytes -= extent.nbytes
        return extent.nbytes

    def _wait_for(self, extent: Extent) -> None:
        for event in self.free.pending_events(extent):
            with suppress(CopyError):  # a failed copy no longer touches the bytes, and was reported already
                self._device.synchronize(event)
