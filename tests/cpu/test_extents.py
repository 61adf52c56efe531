# SPDX-License-Identifier: Apache-2.0
"""Free extents against a naive model that looks at every byte."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_engine._host.extents import FreeExtents
from offload_engine._host.unawaited import UnawaitedCopies

SLABS = 3
SLAB_BYTES = 24


class FakeEvent:
    """An event that completes when the test says so. Equal to others, to catch bookkeeping that relies on equality."""

    done = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeEvent)

    __hash__ = None  # type: ignore[assignment]


@dataclass
class NaiveExtents:
    """Every byte on its own; `order` is that of the free run a byte belongs to."""

    order: list[dict[int, int]] = field(default_factory=lambda: [{} for _ in range(SLABS)])
    events: list[dict[int, list[FakeEvent]]] = field(default_factory=lambda: [{} for _ in range(SLABS)])
    next_order: int = 0

    def runs(self) -> list[tuple[int, int, int, int]]:
        """Maximal free runs as (bytes, order, slab, start): the smallest tuple that fits is the one to take."""
        found = []
        for slab in range(SLABS):
            free = self.order[slab]
            for start in sorted(free):
                if start - 1 not in free:
                    end = start
                    while end in free:
                        end += 1
                    found.append((end - start, free[start], slab, start))
        return sorted(found)

    def take(self, nbytes: int) -> tuple[int, int, list[FakeEvent]] | None:
        fitting = [run for run in self.runs() if run[0] >= nbytes]
        if not fitting:
            return None
        _, _, slab, start = fitting[0]
        distinct = {}
        for byte in range(start, start + nbytes):
            del self.order[slab][byte]
            distinct.update({id(event): event for event in self.events[slab].pop(byte, []) if not event.done})
        return slab, start, list(distinct.values())

    def put(self, slab: int, start: int, nbytes: int, events: list[FakeEvent]) -> None:
        for byte in range(start, start + nbytes):
            self.order[slab][byte] = self.next_order
            self.events[slab][byte] = events
        for run_bytes, _, run_slab, run_start in self.runs():
            if run_slab == slab and run_start <= start < run_start + run_bytes:
                self.order[slab].update(dict.fromkeys(range(run_start, run_start + run_bytes), self.next_order))
        self.next_order += 1


def ids(events: object) -> set[int]:
    return {id(event) for event in events}  # type: ignore[attr-defined]


TAKE = st.tuples(st.just("take"), st.integers(1, 8) | st.integers(1, SLAB_BYTES))
PUT = st.tuples(st.just("put"), st.integers(0, 50), st.integers(0, 2))
DONE = st.tuples(st.just("done"), st.integers(0, 50))


@settings(deadline=None, derandomize=True, database=None, max_examples=300)
@given(st.lists(st.one_of(TAKE, PUT, TAKE, PUT, DONE), min_size=20, max_size=80))
def test_like_the_naive_model(ops):
    extents, naive = FreeExtents(operator.attrgetter("done"), UnawaitedCopies()), NaiveExtents()
    live: list[tuple[int, int, int]] = []
    events: list[FakeEvent] = []
    for slab in range(SLABS):
        extents.put(slab, 0, SLAB_BYTES)
        naive.put(slab, 0, SLAB_BYTES, [])
    for op in ops:
        if op[0] == "take":
            taken, expected = extents.take(op[1]), naive.take(op[1])
            assert (taken is None) == (expected is None)
            if taken is not None:
                assert (taken.slab, taken.start) == expected[:2]
                assert len(taken.events) == len(expected[2]), "an event twice, or lost"
                assert ids(taken.events) == ids(expected[2])
                live.append((taken.slab, taken.start, op[1]))
        elif op[0] == "put" and live:
            returned = live.pop(op[1] % len(live))
            fresh = [FakeEvent() for _ in range(op[2])]
            events += fresh
            extents.put(*returned, fresh)
            naive.put(*returned, fresh)
        elif op[0] == "done" and events:
            events[op[1] % len(events)].done = True
        assert [(e.nbytes, e.order, e.slab, e.start) for e in extents] == naive.runs()
    for returned in live:
        extents.put(*returned)
    assert sorted((e.slab, e.start, e.nbytes) for e in extents) == [(s, 0, SLAB_BYTES) for s in range(SLABS)]


def test_bytes_read_by_unawaited_copies_are_taken_last():
    near, far = FakeEvent(), FakeEvent()
    ahead = UnawaitedCopies()
    ahead.add(far)
    extents = FreeExtents(operator.attrgetter("done"), ahead)
    extents.put(0, 0, 8, [far])
    extents.put(1, 0, 12, [near])
    extents.put(1, 12, 12, [far])  # one extent with the one before
    assert (extents.take(8).slab, extents.take(4).slab) == (1, 1), "their front waits for none"
    assert extents.take(8).slab == 0, "the smallest that fits, where all are ahead"
    extents.put(2, 0, 6, [far])
    extents.put(3, 0, 20)
    far.done = True
    assert extents.take(6).slab == 2, "a completed copy needs no wait"


def test_removed_bytes_have_no_neighbour_and_completed_events_are_dropped():
    extents, event = FreeExtents(operator.attrgetter("done"), UnawaitedCopies()), FakeEvent()
    extents.put(0, 0, 8, [event])
    (extent,) = extents
    assert ids(extents.pending_events(extent)) == ids([event])
    event.done = True
    assert extents.pending_events(extent) == () and extent.guards == []
    extents.remove(extent)
    extents.put(0, 8, 8)
    assert [extent.nbytes for extent in extents] == [8]


@pytest.mark.parametrize("nbytes", [4, 8, 12, 24])
def test_a_device_that_raises_takes_nothing(nbytes: int) -> None:
    """The front of a range as it was returned, a range, the front of an extent with its guards split, and a whole."""
    events = [FakeEvent(), FakeEvent(), FakeEvent()]
    is_raising = True

    def answer(event: FakeEvent) -> bool:
        if is_raising:
            raise RuntimeError("no device")
        return event.done

    extents = FreeExtents(answer, UnawaitedCopies())
    for number, event in enumerate(events):
        extents.put(0, 8 * number, 8, [event])
    with pytest.raises(RuntimeError, match="no device"):
        extents.take(nbytes)
    is_raising = False
    taken = [extents.take(4) for _ in range(6)]
    assert [(each.slab, each.start) for each in taken] == [(0, 4 * number) for number in range(6)]
    assert [ids(each.events) for each in taken] == [ids([events[number // 2]]) for number in range(6)]
    assert len(extents) == 0
