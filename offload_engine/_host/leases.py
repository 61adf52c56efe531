"""One lease of host bytes for each group, and a region of it for each storage."""

from __future__ import annotations

from collections.abc import Sequence

from offload_engine._devices.base import Event
from offload_engine._devices.regions import HostRegion
from offload_engine._host.pool import HostLease, HostPool
from offload_engine._saved.storage import SavedStorage


class GroupLease:
    """One lease for all storages that a group copies out; it goes back when the last of them gives up its part."""

    __slots__ = ("lease", "num_storages", "events", "copied_in", "_pool")

    def __init__(self, pool: HostPool, lease: HostLease, num_storages: int) -> None:
        self.lease = lease
        self.num_storages = num_storages
        self.events: list[Event] = []  # last copy of each part that was given up
        self.copied_in: Event | None = None  # last copy-in of a part that was not; behind all others in its queue
        self._pool = pool

    def give_up_part(self, last_copy: Event | None, num_storages: int = 1) -> None:
        """So many storages need their parts no more once `last_copy` has completed."""
        if last_copy is not None and last_copy not in self.events:
            self.events.append(last_copy)
        self.num_storages -= num_storages
        if self.num_storages == 0:
            if self.copied_in is not None and self.copied_in not in self.events:
                self.events.append(self.copied_in)
            self._pool.give_back(self.lease, self.events)


def lend(pool: HostPool, storages: Sequence[SavedStorage], alignment: int) -> HostLease | None:
    """One lease with a region for each storage; None, and nothing lent, where the host tier has no room.

    Args:
        pool: lends the bytes.
        storages: get the lease and their regions.
        alignment: of each region, in bytes.
    """
    mask = -alignment
    total = 0
    for saved in storages:
        total += (saved.nbytes + alignment - 1) & mask
    lease = pool.lend(total)
    if lease is None:
        return None
    slab, offset = lease.region.slab, lease.region.offset
    group_lease = GroupLease(pool, lease, len(storages))
    for saved in storages:
        saved.lease, saved.region = group_lease, HostRegion(slab, offset, saved.nbytes)
        offset += (saved.nbytes + alignment - 1) & mask
    return lease


def give_up_region(saved: SavedStorage, last_copy: Event | None) -> None:
    """A storage needs its host bytes no more once `last_copy` has completed."""
    lease, saved.lease = saved.lease, None
    assert lease is not None
    lease.give_up_part(last_copy)


def give_up_regions(storages: Sequence[SavedStorage], last_copy: Event) -> None:
    """As `give_up_region` for each that is not read once; a lease, nearly always the same for all, is told once."""
    num_storages: dict[GroupLease, int] = {}
    for saved in storages:
        lease = saved.lease
        assert lease is not None
        if saved.group.is_read_once:
            lease.copied_in = last_copy
            continue
        saved.lease = None
        num_storages[lease] = num_storages.get(lease, 0) + 1
    for lease, number in num_storages.items():
        lease.give_up_part(last_copy, number)
