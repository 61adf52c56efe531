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

from offload_engine._devices.base import CopyError
from offload_engine._host.extents import FreeExtents
from offload_engine._host.leases import lend
from offload_engine._host.pool import MIB, HostLease, HostPool
from offload_engine._host.unawaited import UnawaitedCopies
from offload_engine.errors import OffloadError
from tests.lookups import present

ALIGNMENT = 4


@dataclass
class FakeEvent:
    """Equal to others, to catch books that compare by value."""

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
    def open_slabs(self) -> list[int]:
        return [slab.nbytes for slab in self.slabs if not slab.closed]

    @property
    def open_bytes(self) -> int:
        return sum(self.open_slabs)

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


def lend_all(pool: HostPool, *sizes: int) -> list[HostLease]:
    return [present(pool.lend(nbytes)) for nbytes in sizes]


def lend_and_return(pool: HostPool, *sizes: int) -> None:
    """Lend all of them at once."""
    for lease in lend_all(pool, *sizes):
        pool.return_lease(lease)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="limit_bytes must not be negative, got -1"):
        make_pool(limit_bytes=-1)
    make_pool(limit_bytes=0)
    with pytest.raises(ValueError, match="slab_bytes must be positive"):
        make_pool(slab_bytes=0)
    pool, other = make_pool()[0], make_pool()[0]
    with pytest.raises(ValueError, match="at least one byte, got 0"):
        pool.lend(0)
    [lease] = lend_all(pool, 10)
    with pytest.raises(AssertionError, match="did not lend it"):
        other.return_lease(lease)
    with pytest.raises(RuntimeError, match=r"1 lease \(10 bytes\) not returned.*reset_iteration"):
        pool.close()
    pool.return_lease(lease)
    with pytest.raises(AssertionError, match=r"HostLease\(10 bytes, slab 0 at 0, returned, 0 events\) was returned tw"):
        pool.return_lease(lease)
    assert pool.num_leases == 0
    pool.close()
    with pytest.raises(RuntimeError, match="has been closed"):
        pool.lend(1)


def test_the_peak_restarts_from_what_is_lent_now() -> None:
    pool, _ = make_pool()
    returned = lend_all(pool, 8, 16)[1]
    pool.return_lease(returned)
    pool.reset_peak()
    assert pool.peak_lent_bytes == 8


def test_the_bytes_of_a_group_wait_for_the_last_copy_of_each_part_once() -> None:
    pool, _ = make_pool()
    lease, event = present(lend(pool, [8, 8, 8, 8]))[0], FakeEvent()
    for last_copy in (None, event, event, None):
        lease.return_parts(last_copy)
    assert present(lend(pool, [32]))[0].ready_after == (event,)


# -- room -------------------------------------------------------------------------------------------------------------


def test_idle_slabs_make_room_below_the_limit_and_no_more_of_them_than_a_lease_needs() -> None:
    pool, device = make_pool(limit_bytes=96, slab_bytes=32)
    first, second, _ = lend_all(pool, 32, 32, 32)
    reading = FakeEvent()
    pool.return_lease(first, [reading])
    pool.return_lease(second)
    assert pool.lend(64) is None, "one idle slab is still being read"
    assert device.open_bytes == 96, "nothing is closed when that would not be enough"
    reading.done = True
    assert pool.lend(64) is not None and device.open_slabs == [32, 64]
    pool, device = make_pool(limit_bytes=192)
    lend_and_return(pool, 64, 64)
    assert pool.lend(128) is not None and device.open_bytes == 192


def test_a_pool_without_a_limit_takes_a_share_of_free_memory_that_is_not_spared_for_others() -> None:
    pool, device = make_pool(slab_bytes=4)
    device.told_free_bytes = 1000
    assert [pool.lend(100) is None for _ in range(10)] == [False] * 8 + [True] * 2
    assert device.open_bytes == pool.slab_bytes_total == 800 and pool.room_bytes == 0
    device.told_free_bytes = 700  # another process has taken some: the slabs stay
    assert pool.lend(4) is None and device.open_bytes == 800
    device.told_free_bytes = 2000  # a machine that has grown
    assert pool.room_bytes == 800 and pool.lend(800) is not None
    pool, device = make_pool(told_free_bytes=1000)
    pool.spare(500)
    assert pool.lend(401) is None and pool.lend(400)  # four fifths of the other half
    device.told_free_bytes = 500
    pool.spare(0)  # they have been taken
    assert pool.lend(1) is None
    limited, _ = make_pool(limit_bytes=1000, told_free_bytes=1000)
    limited.spare(500)
    assert limited.lend(1000)


def test_room_is_the_largest_lease() -> None:
    pool, device = make_pool(limit_bytes=1003, slab_bytes=600)
    assert pool.room_bytes == 1000 and pool.lend(1001) is None and not device.slabs
    pool.lend(100)
    assert pool.room_bytes == 500  # of the first slab; a second would have 400
    assert pool.lend(504) is None and pool.lend(500) is not None and pool.lend(400) is not None


def test_a_slab_is_as_large_as_the_lease_where_no_larger_one_can_be_had() -> None:
    pool, device = make_pool(slab_bytes=64, capacity=80)
    first, second = lend_all(pool, 60, 16)
    assert device.open_slabs == [64, 16] and pool.lend(8) is None
    pool.return_lease(first)
    assert pool.lend(72) is None and device.open_slabs[-1] == 16
    pool.return_lease(second)
    assert pool.lend(72) is not None and device.open_bytes == 72, "idle slabs make room"
    pool, device = make_pool(slab_bytes=64, capacity=96)
    assert pool._slabs.grow(16, 64) and device.open_bytes == 64  # one, and not one of each size
    assert pool._slabs.grow(16, 64) and device.open_bytes == 80
    assert pool._slabs.grow(32, 64) and device.open_bytes == 32  # the idle ones have made room
    assert not make_pool(limit_bytes=64)[0]._slabs.grow(128, 64)
    pool, device = make_pool(slab_bytes=64)
    lend_and_return(pool, 64)
    pool.reset_peak()
    lend_all(pool, 64, 16)
    assert device.open_slabs == [64, 16], "behind the first step little is missing"


@pytest.mark.parametrize("left_bytes", [0, 64])
def test_host_bytes_taken_by_others_are_not_available(left_bytes: int) -> None:
    """Between two looks at what is free, another process pins most of it: then the host tier is full."""
    pool, device = make_pool()
    device.free_host_bytes = mock.Mock(side_effect=[1024, *[left_bytes] * 9])  # type: ignore[method-assign]
    assert not pool._slabs.grow(128, 64) and not device.slabs


@pytest.mark.parametrize(
    ("tensor_bytes", "chunk_tensors", "chunks_in_flight", "microbatches"),
    [(8 * MIB, 40, 4, 6), (40 * MIB, 40, 4, 6), (70 * MIB, 20, 6, 8), (130 * MIB, 8, 8, 10)],
)
def test_changing_sizes_take_little_more_than_their_peak(
    tensor_bytes: int, chunk_tensors: int, chunks_in_flight: int, microbatches: int
) -> None:
    """Mixture of experts: tensor sizes change in every microbatch, order is that of 1F1B."""
    pool, device = make_pool(slab_bytes=64 * MIB)
    draw, peak_bytes = random.Random(0), 0
    for _ in range(200):
        pool.reset_peak()
        in_flight: list[list[HostLease]] = []
        for microbatch in range(microbatches + chunks_in_flight - 1):
            if microbatch < microbatches:
                sizes = [int(tensor_bytes * draw.uniform(0.6, 1.4)) for _ in range(chunk_tensors)]
                in_flight.append(lend_all(pool, *sizes))
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
        for lease in lend_all(pool, *[40] * 8):
            pool.return_lease(lease, [reading])
    assert len(device.slabs) == 8, "a slab each, and a copy is still reading one"
    reading.done = True
    pool.lend(40)
    assert device.open_slabs == [332], "the peak of 320 and a little"
    tolerated, device = make_pool(slab_bytes=64, limit_bytes=108)
    lend_and_return(tolerated, 60, 40)
    assert tolerated.lend(4) and device.open_slabs == [64, 44]


def test_slabs_are_not_replaced_again_and_again() -> None:
    """Holes may cost more than the tolerated waste in every step; new slabs would have them too."""
    pool, device = make_pool(slab_bytes=64)
    lend_and_return(pool, *[40] * 8)
    for _ in range(5):
        early, late = lend_all(pool, 160, 160)
        pool.return_lease(early)
        for lease in (late, *lend_all(pool, 20, 150)):  # the 20 are in the hole that the 150 would need
            pool.return_lease(lease)
    assert device.open_slabs == [332, 152] and len(device.slabs) == 10


def test_a_frozen_pool_refuses_what_only_the_freeze_forbids_and_keeps_its_slabs_until_it_is_thawed() -> None:
    limited, _ = make_pool(limit_bytes=64)
    limited.freeze()
    assert limited.lend(65) is None
    with pytest.raises(OffloadError, match="none can be"):
        limited.lend(64)
    pool, _ = make_pool(slab_bytes=64)
    assert pool._slabs.grow(64, 64) and pool._slabs.grow(64, 64)  # more than was ever lent
    pool._is_frozen = True  # without the replacement that a freeze begins with
    lend_and_return(pool, 16)
    assert len(pool._slabs.by_index) == 2
    pool.thaw()
    pool.freeze()
    pool.thaw()
    assert len(pool._slabs.by_index) == 1 and pool.lend(16) is not None


# -- returns at any time, and recovery ---------------------------------------------------------------------------------


def test_close_waits_for_copies_also_failed_ones() -> None:
    pool, device = make_pool(slab_bytes=32)
    reading, failed = FakeEvent(), FakeEvent(fails=True)
    for lease, event in zip(lend_all(pool, 16, 16), (failed, reading), strict=True):
        pool.return_lease(lease, [event])
    pool.close()
    pool.close()
    assert reading.done and device.open_bytes == pool.slab_bytes_total == 0


def test_new_books_take_back_a_lease_that_was_lost_and_ignore_those_of_the_old_ones() -> None:
    pool, device = make_pool(slab_bytes=32)
    lost, late = lend_all(pool, 8, 16)
    del lost
    pool._lock.acquire()  # and the lock is left taken
    pool._slabs.nbytes = 0  # as if interrupted before it was counted
    pool.reset()
    other = threading.Thread(target=pool.reset_peak, daemon=True)
    other.start()
    other.join(timeout=10)
    assert not other.is_alive()
    assert pool.num_leases == pool.lent_bytes == 0 and pool.slab_bytes_total == 32
    [lease] = lend_all(pool, 32)
    pool.return_lease(late)  # it has no bytes any more
    assert (pool.num_leases, pool.lent_bytes, len(device.slabs)) == (1, 32, 1)
    pool.return_lease(lease, [FakeEvent(fails=True)])
    pool.reset()
    assert present(pool.lend(32)).ready_after == (), "a copy that failed holds none back"


def test_returns_by_the_garbage_collector_in_the_middle_of_a_call() -> None:
    """A cycle that owns a lease may be collected at any allocation, also at those of the pool itself."""
    pool, device = make_pool()

    class Owner:
        def __init__(self) -> None:
            [self.lease] = lend_all(pool, 8)
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
    pool.lend(100)
    assert (pool.num_leases, pool.lent_bytes) == (1, 100)
    limited, _ = make_pool(limit_bytes=64)
    [lease] = lend_all(limited, 64)
    with limited._lock:  # as in the middle of an operation
        limited.return_lease(lease, ())
    assert limited.room_bytes == 64


# -- free extents, of which the slabs consist --------------------------------------------------------------------------


def make_extents(ahead: UnawaitedCopies | None = None) -> FreeExtents:
    return FreeExtents(operator.attrgetter("done"), ahead or UnawaitedCopies())


def ids(events: Any) -> set[int]:
    return {id(event) for event in events}


def test_the_smallest_that_fits_and_of_equals_the_one_returned_first() -> None:
    extents = make_extents()
    for slab, start, nbytes in ((0, 0, 16), (3, 0, 8), (1, 0, 4), (2, 0, 8), (2, 8, 8), (4, 16, 8), (4, 8, 4)):
        extents.put(slab, start, nbytes)  # two of slab 2 become one, and those of slab 4 do not touch
    taken = [present(extents.take(nbytes)) for nbytes in (5, 5, 5, 3, 9, 4, 4, 9)]
    places = [(3, 0), (4, 16), (0, 0), (3, 5), (0, 5), (1, 0), (4, 8), (2, 0)]
    assert [(each.slab, each.start) for each in taken] == places


def test_bytes_read_by_unawaited_copies_are_taken_last() -> None:
    near, far, ahead = FakeEvent(), FakeEvent(), UnawaitedCopies()
    ahead.add(far)
    extents = make_extents(ahead)
    extents.put(0, 0, 8, [far])
    extents.put(1, 0, 12, [near])
    extents.put(1, 12, 12, [far])  # one extent with the one before
    assert (present(extents.take(8)).slab, present(extents.take(4)).slab) == (1, 1), "their front waits for none"
    assert present(extents.take(8)).slab == 0, "the smallest that fits, where all are ahead"
    extents.put(2, 0, 6, [far])
    extents.put(3, 0, 20)
    far.done = True
    assert present(extents.take(6)).slab == 2, "a completed copy needs no wait"
    far.done = False
    extents = make_extents(ahead)
    extents.put(0, 8, 8)
    extents.put(0, 0, 8)
    assert present(extents.take(8)).start == 8, "that others are unawaited merges nothing"
    extents, event = make_extents(), FakeEvent()
    extents.put(0, 0, 8, [event])
    (extent,) = extents
    assert ids(extents.pending_events(extent)) == ids([event])
    event.done = True
    assert extents.pending_events(extent) == () and extent.guards == []
    extents.remove(extent)
    extents.put(0, 8, 8)
    assert [extent.nbytes for extent in extents] == [8], "removed bytes have no neighbour"
    extents.put(0, 16, 8, [near])
    assert len(list(extents)) == 1, "those that touch are one"
    extents.put(0, 0, 8, [near])
    assert present(extents.take(24)).events == (near,), "which waits for the copies of both, once"
    for first, second in ((0, 8), (8, 0)):
        extents = make_extents()
        extents.put(0, first, 8, [near])
        extents.put(0, second, 8, [event := FakeEvent()])
        assert ids(present(extents.take(16)).events) == ids([near, event]), "whichever was returned first"


@pytest.mark.parametrize("nbytes", [4, 8, 12, 24])
def test_a_device_that_raises_takes_nothing(nbytes: int) -> None:
    """The front of a range as it was returned, a range, the front of an extent with its guards split, and a whole."""
    events, answer = [FakeEvent(), FakeEvent(), FakeEvent()], mock.Mock(side_effect=RuntimeError("no device"))
    extents = FreeExtents(answer, UnawaitedCopies())
    for number, event in enumerate(events):
        extents.put(0, 8 * number, 8, [event])
    with pytest.raises(RuntimeError, match="no device"):
        extents.take(nbytes)
    answer.side_effect = operator.attrgetter("done")
    taken = [present(extents.take(4)) for _ in range(6)]
    assert [(each.slab, each.start) for each in taken] == [(0, 4 * number) for number in range(6)]
    assert [ids(each.events) for each in taken] == [ids([events[number // 2]]) for number in range(6)]
    assert not list(extents)


def test_slabs_set_aside_count_against_the_limit_of_the_pool_and_of_further_books() -> None:
    pool, _ = make_pool(limit_bytes=128, slab_bytes=32)
    lend_and_return(pool, 128)
    beside = pool.books_beside()
    assert beside.grow(64, 64)
    pool.set_aside(beside)
    assert pool.room_bytes == 64
    lend_all(pool, 32)
    assert pool.books_beside().room() == 32
