# SPDX-License-Identifier: Apache-2.0
"""The host pool: no overlap, ordering by events, the limit, and how much it takes from the system."""

from __future__ import annotations

import gc
import operator
import random
import threading
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_engine._devices.base import CopyError
from offload_engine._host.extents import FreeExtents
from offload_engine._host.leases import lend
from offload_engine._host.pool import MIB, HostLease, HostPool
from offload_engine._host.unawaited import UnawaitedCopies
from tests.lookups import present

ALIGNMENT = 4


@dataclass
class FakeEvent:
    """Equal to others, to catch bookkeeping that relies on equality."""

    fails: bool = False
    done: bool = False


@dataclass(eq=False)
class FakeSlab:
    nbytes: int
    closed: bool = False

    def close(self) -> None:
        assert not self.closed
        self.closed = True


@dataclass
class FakeDevice:
    """A host tier of `capacity` bytes that only counts."""

    capacity: int = 1 << 60
    host_alignment: int = ALIGNMENT
    slabs: list[FakeSlab] = field(default_factory=list)
    told_free_bytes: int = 1 << 60  # with no slab open; what really is there, `capacity`, is met by surprise

    @property
    def open_bytes(self) -> int:
        return sum(slab.nbytes for slab in self.slabs if not slab.closed)

    def free_host_bytes(self) -> int:
        return self.told_free_bytes - self.open_bytes

    def new_slab(self, nbytes: int) -> FakeSlab:
        assert nbytes > 0 and nbytes % self.host_alignment == 0
        if self.open_bytes + nbytes > self.capacity:
            raise MemoryError(nbytes)
        self.slabs.append(FakeSlab(nbytes))
        return self.slabs[-1]

    def is_complete(self, event: FakeEvent) -> bool:
        return event.done and not event.fails

    def synchronize(self, event: FakeEvent) -> None:
        if event.fails:
            raise CopyError("no space left on device")
        event.done = True


def make_pool(limit_bytes: int | None = None, slab_bytes: int = 64, **device: Any) -> tuple[HostPool, FakeDevice]:
    fake = FakeDevice(**device)
    return HostPool(fake, limit_bytes, slab_bytes), fake  # type: ignore[arg-type]


def test_host_bytes_taken_by_others_are_not_available() -> None:
    """Between two looks at what is free, another process pins most of it: then the host tier is full."""
    for left_bytes in (0, 64):
        pool, device = make_pool()
        device.free_host_bytes = mock.Mock(side_effect=[1024, *[left_bytes] * 9])  # type: ignore[method-assign]
        assert not pool._slabs.grow(128, 64) and not device.slabs


def test_bytes_spared_for_others_are_lent_only_under_a_limit() -> None:
    pool, device = make_pool(told_free_bytes=1000)
    pool.spare(500)
    assert pool.lend(401) is None and pool.lend(400)  # four fifths of the other half
    device.told_free_bytes = 500
    pool.spare(0)  # they have been taken
    assert pool.lend(1) is None
    limited, _ = make_pool(limit_bytes=1000, told_free_bytes=1000)
    limited.spare(500)
    assert limited.lend(1000)


def slab_of(lease: HostLease) -> FakeSlab:
    assert isinstance(lease.region.slab, FakeSlab)
    return lease.region.slab


class CheckedPool:
    """A pool whose every lease is compared with all others, and with the events of the bytes' earlier users."""

    def __init__(self, limit_bytes: int | None, slab_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.pool, self.device = make_pool(limit_bytes, slab_bytes)
        self.live: list[HostLease] = []
        self.used: list[tuple[int, int, int, FakeEvent]] = []  # (slab id, start, end, event), oldest first
        self.events: list[FakeEvent] = []
        self.peak = 0

    def lend(self, nbytes: int) -> None:
        lease = self.pool.lend(nbytes)
        if lease is None:
            assert self.limit_bytes is not None
            return
        slab, start, end = self._range(lease)
        assert lease.region.nbytes == nbytes and start % ALIGNMENT == 0
        assert 0 <= start and end <= lease.region.slab.nbytes and not slab_of(lease).closed
        for other in self.live:
            other_slab, other_start, other_end = self._range(other)
            assert other_slab != slab or other_end <= start or end <= other_start, "two live leases overlap"
        expected = {id(e) for s, a, b, e in self.used if s == slab and a < end and start < b and not e.done}
        assert {id(event) for event in lease.ready_after} == expected and len(lease.ready_after) == len(expected)
        self.used = [use for use in self.used if use[0] != slab or use[2] <= start or end <= use[1]] + [
            piece for use in self.used if use[0] == slab for piece in self._outside(use, start, end)
        ]
        self.live.append(lease)

    def return_lease(self, index: int, num_events: int) -> None:
        if not self.live:
            return
        lease = self.live.pop(index % len(self.live))
        fresh = [FakeEvent() for _ in range(num_events)]
        self.events += fresh
        self.used += [(*self._range(lease), event) for event in fresh]
        self.pool.return_lease(lease, fresh)

    def complete(self, index: int) -> None:
        if self.events:
            self.events[index % len(self.events)].done = True

    def trim(self) -> None:
        self.pool.trim()

    def reset_peak(self) -> None:
        self.pool.reset_peak()
        self.peak = 0

    def check(self) -> None:
        assert self.pool.num_leases == len(self.live)
        assert self.pool.lent_bytes == sum(lease.region.nbytes for lease in self.live)
        self.peak = max(self.peak, self.pool.lent_bytes)
        assert self.pool.peak_lent_bytes == self.peak
        assert self.pool.slab_bytes_total == self.device.open_bytes
        assert self.limit_bytes is None or self.device.open_bytes <= self.limit_bytes

    def finish(self) -> None:
        while self.live:
            self.return_lease(0, 1)
        self.check()
        whole = sorted((extent.start, extent.nbytes) for extent in self.pool._slabs.free)
        assert whole == sorted((0, slab.nbytes) for slab in self.device.slabs if not slab.closed)
        for event in self.events:
            event.done = True
        self.pool.trim()
        assert self.device.open_bytes == self.pool.slab_bytes_total == 0
        self.pool.close()

    @staticmethod
    def _range(lease: HostLease) -> tuple[int, int, int]:
        """Return the slab id, start and end of the aligned bytes."""
        start, nbytes = lease.region.offset, lease.region.nbytes
        return id(lease.region.slab), start, start + -(-nbytes // ALIGNMENT) * ALIGNMENT

    @staticmethod
    def _outside(use: tuple[int, int, int, FakeEvent], start: int, end: int) -> list[tuple[int, int, int, FakeEvent]]:
        """Return the parts of an overlapping use on both sides of bytes that have got a new user."""
        slab, a, b, event = use
        is_overlapping = start < b and a < end
        return [(slab, x, y, event) for x, y in ((a, start), (end, b)) if is_overlapping and x < y]


@settings(deadline=None, derandomize=True, database=None, max_examples=300)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("lend"), st.integers(1, 100)),
            st.tuples(st.just("lend"), st.integers(1, 100)),
            st.tuples(st.just("return_lease"), st.integers(0, 50), st.integers(0, 2)),
            st.tuples(st.just("complete"), st.integers(0, 50)),
            st.tuples(st.just("trim")),
            st.tuples(st.just("reset_peak")),
        ),
        max_size=60,
    ),
    st.one_of(st.none(), st.integers(0, 400)),
    st.sampled_from([4, 32, 64]),
)
def test_random_use(ops: list[Any], limit_bytes: int | None, slab_bytes: int) -> None:
    checked = CheckedPool(limit_bytes, slab_bytes)
    for name, *arguments in ops:
        getattr(checked, name)(*arguments)
        checked.check()
    checked.finish()


def test_arguments() -> None:
    with pytest.raises(ValueError, match="limit_bytes must not be negative, got -1"):
        make_pool(limit_bytes=-1)
    with pytest.raises(ValueError, match="slab_bytes must be positive"):
        make_pool(slab_bytes=0)
    pool, _ = make_pool()
    with pytest.raises(ValueError, match="at least one byte, got 0"):
        pool.lend(0)


def test_the_bytes_of_a_group_wait_for_the_last_copy_of_each_part_once() -> None:
    pool, _ = make_pool()
    lease, event = present(lend(pool, [8, 8, 8, 8]))[0], FakeEvent()
    for last_copy in (None, event, event, None):
        lease.return_parts(last_copy)
    assert present(lend(pool, [32]))[0].ready_after == (event,)


def test_returned_twice_or_to_another_pool() -> None:
    pool, other = make_pool()[0], make_pool()[0]
    lease = present(pool.lend(10))
    with pytest.raises(AssertionError, match="did not lend it"):
        other.return_lease(lease)
    pool.return_lease(lease)
    with pytest.raises(AssertionError, match=r"HostLease\(10 bytes, slab 0 at 0, returned, 0 events\) was returned tw"):
        pool.return_lease(lease)
    assert pool.num_leases == 0


def test_idle_slabs_make_room_below_the_limit() -> None:
    pool, device = make_pool(limit_bytes=96, slab_bytes=32)
    leases = [present(pool.lend(32)) for _ in range(3)]
    reading = FakeEvent()
    pool.return_lease(leases[0], [reading])
    pool.return_lease(leases[1])
    assert pool.lend(64) is None, "one idle slab is still being read"
    assert device.open_bytes == 96, "nothing is closed when that would not be enough"
    reading.done = True
    assert pool.lend(64) is not None
    assert [slab.closed for slab in device.slabs] == [True, True, False, False]
    assert device.open_bytes == 96


def test_pool_without_a_limit_takes_a_share_of_free_memory() -> None:
    pool, device = make_pool(slab_bytes=4)
    device.told_free_bytes = 1000
    leases = [pool.lend(100) for _ in range(10)]
    assert [lease is None for lease in leases] == [False] * 8 + [True] * 2
    assert device.open_bytes == pool.slab_bytes_total == 800 and pool.room_bytes == 0
    device.told_free_bytes = 700  # another process has taken some: the slabs stay
    assert pool.lend(4) is None and device.open_bytes == 800
    device.told_free_bytes = 2000  # a machine that has grown
    assert pool.room_bytes == 800 and pool.lend(800) is not None


def test_room_is_the_largest_lease() -> None:
    pool, device = make_pool(limit_bytes=1003, slab_bytes=600)
    assert pool.room_bytes == 1000 and pool.lend(1001) is None and not device.slabs
    pool.lend(100)
    assert pool.room_bytes == 500  # of the first slab; a second would have 400
    assert pool.lend(504) is None and pool.lend(500) is not None and pool.lend(400) is not None


def test_full_host_tier() -> None:
    pool, device = make_pool(slab_bytes=64, capacity=80)
    first, second = present(pool.lend(60)), present(pool.lend(16))
    assert [slab.nbytes for slab in device.slabs] == [64, 16], "no room for a whole slab, only for what is needed"
    assert pool.lend(8) is None
    pool.return_lease(first)
    assert pool.lend(72) is None and not slab_of(second).closed
    pool.return_lease(second)
    assert pool.lend(72) is not None and device.open_bytes == 72, "idle slabs make room"


def test_trim_keeps_slabs_in_use_or_being_read() -> None:
    pool, device = make_pool(slab_bytes=32)
    _, read, idle = [present(pool.lend(32)) for _ in range(3)]
    reading = FakeEvent()
    pool.return_lease(read, [reading])
    pool.return_lease(idle)
    assert pool.trim() == 32 and [slab.closed for slab in device.slabs] == [False, False, True]
    reading.done = True
    assert pool.trim() == 32 and pool.slab_bytes_total == 32


def test_close_waits_for_copies_also_failed_ones() -> None:
    pool, device = make_pool(slab_bytes=32)
    reading, failed = FakeEvent(), FakeEvent(fails=True)
    leases = [present(pool.lend(16)), present(pool.lend(16))]
    pool.return_lease(leases[0], [failed])
    pool.return_lease(leases[1], [reading])
    pool.close()
    pool.close()
    assert reading.done and device.open_bytes == pool.slab_bytes_total == 0
    with pytest.raises(RuntimeError, match="has been closed"):
        pool.lend(1)


def test_recovery_takes_back_a_lease_that_was_lost() -> None:
    pool, device = make_pool(slab_bytes=32)
    lost, late = present(pool.lend(8)), present(pool.lend(16))
    del lost
    pool._lock.acquire()  # and the lock is left taken
    pool.reset()
    other = threading.Thread(target=pool.reset_peak, daemon=True)
    other.start()
    other.join(timeout=10)
    assert not other.is_alive()
    assert pool.num_leases == pool.lent_bytes == 0
    lease = present(pool.lend(32))
    pool.return_lease(late)  # it has no bytes any more
    assert pool.lent_bytes == 32 and len(device.slabs) == 1 and lease.region.nbytes == 32
    pool.return_lease(lease, [FakeEvent(fails=True)])
    pool.reset()
    assert present(pool.lend(32)).ready_after == (), "a copy that failed holds none back"


def test_close_with_a_lease_out() -> None:
    pool, _ = make_pool()
    lease = present(pool.lend(10))
    with pytest.raises(RuntimeError, match=r"1 leases \(10 bytes\) not returned.*reset_iteration"):
        pool.close()
    pool.return_lease(lease)
    pool.close()


def test_returns_by_the_garbage_collector_in_the_middle_of_a_call() -> None:
    """A cycle that owns a lease may be collected at any allocation, also at those of the pool itself."""
    pool, device = make_pool()

    class Owner:
        def __init__(self) -> None:
            self.lease = present(pool.lend(8))
            self.cycle = self

        def __del__(self) -> None:
            pool.return_lease(self.lease)

    class CollectingDevice(FakeDevice):
        def new_slab(self, nbytes: int) -> FakeSlab:
            gc.collect()
            return super().new_slab(nbytes)

    device.__class__ = CollectingDevice
    for _ in range(4):
        Owner()
    lease = present(pool.lend(100))
    assert (pool.num_leases, pool.lent_bytes) == (1, 100)
    pool.return_lease(lease)
    pool.close()


def test_returns_from_other_threads() -> None:
    pool, _ = make_pool()
    leases = [present(pool.lend(8)) for _ in range(400)]
    threads = [
        threading.Thread(target=lambda part: [*map(pool.return_lease, part)], args=(leases[i::4],)) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for _ in range(200):
        pool.return_lease(present(pool.lend(12)))
    for thread in threads:
        thread.join()
    assert (pool.num_leases, pool.lent_bytes) == (0, 0)
    pool.close()


@pytest.mark.parametrize(
    ("tensor_bytes", "chunk_tensors", "chunks_in_flight", "microbatches"),
    [(8 * MIB, 40, 4, 6), (40 * MIB, 40, 4, 6), (70 * MIB, 20, 6, 8), (130 * MIB, 8, 8, 10)],
)
def test_changing_sizes_take_little_more_than_their_peak(
    tensor_bytes: int, chunk_tensors: int, chunks_in_flight: int, microbatches: int
) -> None:
    """The leases of a model whose tensors change size by 40% either way with every call, under 1F1B: as experts."""
    pool, device = make_pool(slab_bytes=64 * MIB, host_alignment=4096)
    draw, peak_bytes = random.Random(0), 0
    for _ in range(200):
        pool.reset_peak()
        in_flight: list[list[HostLease]] = []
        for microbatch in range(microbatches + chunks_in_flight - 1):
            if microbatch < microbatches:
                sizes = [int(tensor_bytes * draw.uniform(0.6, 1.4)) for _ in range(chunk_tensors)]
                in_flight.append([present(pool.lend(nbytes)) for nbytes in sizes])
            if microbatch >= chunks_in_flight - 1:
                for lease in reversed(in_flight.pop(0)):
                    pool.return_lease(lease)
        peak_bytes = max(peak_bytes, pool.peak_lent_bytes)
    assert peak_bytes > 1024 * MIB and pool.lent_bytes == 0
    assert pool.slab_bytes_total <= 1.10 * peak_bytes
    assert sum(slab.nbytes for slab in device.slabs) <= 2.5 * peak_bytes, "replaced slabs too often"
    pool.close()


def test_wasteful_slabs_are_replaced_once_nothing_is_lent_or_read() -> None:
    pool, device = make_pool(slab_bytes=64)
    reading = FakeEvent()
    for _ in range(2):
        leases = [present(pool.lend(40)) for _ in range(8)]
        for lease in leases:
            pool.return_lease(lease, [reading])
    assert len(device.slabs) == 8, "a slab each, and a copy is still reading one"
    reading.done = True
    pool.lend(40)
    assert [slab.nbytes for slab in device.slabs if not slab.closed] == [332], "the peak of 320 and a little"


def test_slabs_with_the_tolerated_waste_are_kept() -> None:
    pool, device = make_pool(slab_bytes=64, limit_bytes=108)
    for lease in [present(pool.lend(60)), present(pool.lend(40))]:
        pool.return_lease(lease)
    assert pool.lend(4) and [slab.nbytes for slab in device.slabs] == [64, 44]


def test_slabs_are_not_replaced_again_and_again() -> None:
    """Holes may cost more than the tolerated waste in every step; new slabs would have them too."""
    pool, device = make_pool(slab_bytes=64)
    for lease in [present(pool.lend(40)) for _ in range(8)]:
        pool.return_lease(lease)
    for _ in range(5):
        early, late = present(pool.lend(160)), present(pool.lend(160))
        pool.return_lease(early)
        # The 20 are in the hole that the 150 would need.
        for lease in (late, *[present(pool.lend(nbytes)) for nbytes in (20, 150)]):
            pool.return_lease(lease)
    assert [slab.nbytes for slab in device.slabs if not slab.closed] == [332, 152]
    assert len(device.slabs) == 10


# -- free extents, of which the slabs consist --------------------------------------------------------------------------


def ids(events: object) -> set[int]:
    return {id(event) for event in events}  # type: ignore[attr-defined]


def test_the_smallest_that_fits_and_of_equals_the_one_returned_first() -> None:
    extents = FreeExtents(operator.attrgetter("done"), UnawaitedCopies())
    for slab, start, nbytes in ((0, 0, 16), (3, 0, 8), (1, 0, 4), (2, 0, 8), (2, 8, 8), (4, 16, 8), (4, 8, 4)):
        extents.put(slab, start, nbytes)  # two of slab 2 become one, and those of slab 4 do not touch
    taken = [present(extents.take(nbytes)) for nbytes in (5, 5, 5, 3, 9, 4, 4, 9)]
    places = [(3, 0), (4, 16), (0, 0), (3, 5), (0, 5), (1, 0), (4, 8), (2, 0)]
    assert [(each.slab, each.start) for each in taken] == places


def test_bytes_read_by_unawaited_copies_are_taken_last() -> None:
    near, far = FakeEvent(), FakeEvent()
    ahead = UnawaitedCopies()
    ahead.add(far)
    extents = FreeExtents(operator.attrgetter("done"), ahead)
    extents.put(0, 0, 8, [far])
    extents.put(1, 0, 12, [near])
    extents.put(1, 12, 12, [far])  # one extent with the one before
    assert (present(extents.take(8)).slab, present(extents.take(4)).slab) == (1, 1), "their front waits for none"
    assert present(extents.take(8)).slab == 0, "the smallest that fits, where all are ahead"
    extents.put(2, 0, 6, [far])
    extents.put(3, 0, 20)
    far.done = True
    assert present(extents.take(6)).slab == 2, "a completed copy needs no wait"


def test_removed_bytes_have_no_neighbour_and_completed_events_are_dropped() -> None:
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
    taken = [present(extents.take(4)) for _ in range(6)]
    assert [(each.slab, each.start) for each in taken] == [(0, 4 * number) for number in range(6)]
    assert [ids(each.events) for each in taken] == [ids([events[number // 2]]) for number in range(6)]
    assert len(extents) == 0
