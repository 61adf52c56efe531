# SPDX-License-Identifier: Apache-2.0
"""Tracks free ranges of host slabs: best fit, coalescing, and the events of copies that still read the bytes.

Pure Python: slabs are numbers and events are opaque, so the bookkeeping can be tested against a naive model.

A free extent records which copies still read its bytes ("guards"), per byte range instead of as one set of events per
extent. After coalescing, one set would make a copy-out wait for copies out of bytes it does not touch, and would grow
with every merge.

Ranges are merged as late as possible, as in the fast bins of dlmalloc: groups have the same sizes in every step, so
nearly every range that is taken was returned whole, and needs no search.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from offload_engine._host.unawaited import UnawaitedCopies

Event = Any


class Guard:
    """Forbids writes to bytes `start .. end` of a slab until all of `events` have completed."""

    __slots__ = ("start", "end", "events")

    def __init__(self, start: int, end: int, events: tuple[Event, ...]) -> None:
        self.start = start
        self.end = end
        self.events = events


class Extent:
    """A free range of one slab, not adjacent to another one. `order` increases with each return: small is old."""

    __slots__ = ("slab", "start", "nbytes", "order", "guards")

    def __init__(self, slab: int, start: int, nbytes: int, order: int, guards: list[Guard]) -> None:
        self.slab = slab
        self.start = start
        self.nbytes = nbytes
        self.order = order
        self.guards = guards  # ascending and disjoint; bytes without a guard are free at once

    @property
    def end(self) -> int:
        """Return the first byte after the extent."""
        return self.start + self.nbytes


class Returned:
    """A range as it was returned, not merged with its neighbours yet; `order` as that of an `Extent`."""

    __slots__ = ("slab", "start", "nbytes", "order", "events")

    def __init__(self, slab: int, start: int, nbytes: int, order: int, events: Sequence[Event]) -> None:
        self.slab = slab
        self.start = start
        self.nbytes = nbytes
        self.order = order
        self.events = events


class Taken:
    """A range taken by `FreeExtents.take`; it starts at byte `start` of `slab`."""

    __slots__ = ("slab", "start", "events")

    def __init__(self, slab: int, start: int, events: tuple[Event, ...]) -> None:
        self.slab = slab
        self.start = start
        self.events = events


class FreeExtents:
    """Owns all free extents of a pool.

    A range of a size that was returned before is taken in constant time. Any other `take` merges what was returned
    since the last one, in O(log n) searches plus a short `memmove` for each range. While copies run ahead, it may
    examine every extent that is large enough.

    Args:
        is_complete: returns whether an event has completed; completed events are forgotten.
        unawaited: bytes that one of these copies reads are taken last.
    """

    def __init__(self, is_complete: Callable[[Event], bool], unawaited: UnawaitedCopies) -> None:
        self._is_complete = is_complete
        self._unawaited = unawaited
        self._by_size: list[tuple[int, int, Extent]] = []  # (nbytes, order, extent): orders differ, so a total order
        self._by_start: dict[tuple[int, int], Extent] = {}
        self._by_end: dict[tuple[int, int], Extent] = {}
        self._next_order = 0
        self._returned: dict[int, deque[Returned]] = {}  # by size, each oldest first

    def __iter__(self) -> Iterator[Extent]:
        self._merge()
        return (extent for _, _, extent in self._by_size)

    def take(self, nbytes: int) -> Taken | None:
        """Take a range of this size that was returned whole, else the front of the smallest extent that fits.

        Of equal ones the least recently returned is taken.

        Returns:
            The range, with those events of its bytes that have not completed yet; None if no extent fits.
        """
        returned = self._returned.get(nbytes)
        if returned and not (len(self._unawaited) and self._has_unawaited(returned[0].events)):
            oldest = returned[0]
            taken = Taken(oldest.slab, oldest.start, self._incomplete(oldest.events))
            returned.popleft()  # last: if the device raises, the range stays free

            return taken
        self._merge()
        return self._take_merged(nbytes)

    def put(self, slab: int, start: int, nbytes: int, events: Sequence[Event] = ()) -> None:
        """Return a range, to be merged later with the free neighbours on both sides inside the same slab."""
        returned = self._returned.get(nbytes)
        if returned is None:
            returned = self._returned[nbytes] = deque()
        returned.append(Returned(slab, start, nbytes, self._next_order, events))
        self._next_order += 1

    def remove(self, extent: Extent) -> None:
        """Remove a whole extent."""
        del self._by_size[bisect_left(self._by_size, (extent.nbytes, extent.order))]
        del self._by_start[extent.slab, extent.start]
        del self._by_end[extent.slab, extent.end]

    def pending_events(self, extent: Extent) -> tuple[Event, ...]:
        """Return the events of the extent's bytes that have not completed; forget the completed ones."""
        extent.guards = [guard for guard in extent.guards if not all(map(self._is_complete, guard.events))]
        return self._pending(extent.guards)

    def forget_events(self) -> None:
        """Forget all events; call it when every copy has completed or failed."""
        for extent in self:
            extent.guards.clear()

    def _take_merged(self, nbytes: int) -> Taken | None:
        index = bisect_left(self._by_size, (nbytes,))
        if index == len(self._by_size):
            return None
        if len(self._unawaited):
            index = self._first_awaited(index, nbytes)
        extent = self._by_size[index][2]
        below = _guards_below(extent.guards, extent.start + nbytes)
        taken = Taken(extent.slab, extent.start, self._pending(below))  # first: if the device raises, nothing changes
        self._cut(index, nbytes, below)
        return taken

    def _cut(self, index: int, nbytes: int, guards: Sequence[Guard]) -> None:
        """Split `nbytes` off the front of an extent, with those guards; the last may reach beyond and stays there."""
        extent = self._by_size.pop(index)[2]
        slab, cut = extent.slab, extent.start + nbytes
        del self._by_start[slab, extent.start]
        if extent.nbytes == nbytes:
            del self._by_end[slab, cut]
            return
        extent.start, extent.nbytes = cut, extent.nbytes - nbytes
        self._by_start[slab, cut] = extent
        insort(self._by_size, (extent.nbytes, extent.order, extent))
        if guards:
            last = guards[-1]
            beyond = [Guard(cut, last.end, last.events)] if last.end > cut else []
            extent.guards[: len(guards)] = beyond

    def _merge(self) -> None:
        """Merge every returned range with its neighbours, in the order of the returns."""
        if self._returned:
            ranges = [each for returned in self._returned.values() for each in returned]
            self._returned.clear()
            for each in sorted(ranges, key=_order_of):
                self._merge_one(each)

    def _merge_one(self, returned: Returned) -> None:
        slab, start = returned.slab, returned.start
        end = start + returned.nbytes
        guards = [Guard(start, end, tuple(returned.events))] if returned.events else []
        left = self._by_end.get((slab, start))
        right = self._by_start.get((slab, end))
        if left is not None:
            self.remove(left)
            left.guards.extend(guards)  # in place: the list only ever belongs to one extent
            start, guards = left.start, left.guards
        if right is not None:
            self.remove(right)
            guards.extend(right.guards)
            end = right.end
        self._insert(Extent(slab, start, end - start, returned.order, guards))

    def _first_awaited(self, begin: int, nbytes: int) -> int:
        """Return the index of the smallest extent from `begin` on whose front no unawaited copy reads, or `begin`."""
        for index in range(begin, len(self._by_size)):
            extent = self._by_size[index][2]
            if not self._is_unawaited(extent.guards, extent.start + nbytes):
                return index
        return begin

    def _is_unawaited(self, guards: Sequence[Guard], end: int) -> bool:
        for guard in guards:
            if guard.start >= end:
                return False
            if self._has_unawaited(guard.events):
                return True
        return False

    def _has_unawaited(self, events: Sequence[Event]) -> bool:
        for event in events:
            if self._unawaited.has(event) and not self._is_complete(event):
                return True
        return False

    def _insert(self, extent: Extent) -> None:
        insort(self._by_size, (extent.nbytes, extent.order, extent))
        self._by_start[extent.slab, extent.start] = extent
        self._by_end[extent.slab, extent.end] = extent

    def _pending(self, guards: Sequence[Guard]) -> tuple[Event, ...]:
        return self._incomplete([event for guard in guards for event in guard.events])

    def _incomplete(self, events: Sequence[Event]) -> tuple[Event, ...]:
        """Return those of `events` that have not completed, each once."""
        if len(events) == 1:  # nearly always
            return () if self._is_complete(events[0]) else (events[0],)
        distinct = {id(event): event for event in events}  # events need not be hashable
        return tuple(event for event in distinct.values() if not self._is_complete(event))


def _guards_below(guards: Sequence[Guard], end: int) -> list[Guard]:
    """Return the guards of bytes below `end`, which are the first ones."""
    count = 0
    while count < len(guards) and guards[count].start < end:
        count += 1
    return list(guards[:count])


def _order_of(returned: Returned) -> int:
    return returned.order
