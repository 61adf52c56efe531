# SPDX-License-Identifier: Apache-2.0
"""One lease of host bytes per group, and one region of it per storage."""

from __future__ import annotations

from offload_engine._devices.base import Event
from offload_engine._devices.regions import HostRegion
from offload_engine._host.pool import HostLease, HostPool


class GroupLease:
    """One lease for all storages that a group copies out; returned to the pool with its last part."""

    __slots__ = ("num_parts", "events", "copied_in", "_lease", "_pool")

    def __init__(self, pool: HostPool, lease: HostLease, num_parts: int) -> None:
        self.num_parts = num_parts
        self.events: list[Event] = []  # last copy of each returned part
        self.copied_in: Event | None = None  # last copy-in of a part that is not returned; completes after earlier ones
        self._lease = lease
        self._pool = pool

    @property
    def ready_after(self) -> tuple[Event, ...]:
        """Return the events of earlier users of these bytes; a copy-out waits for all of them before the first byte."""
        return self._lease.ready_after

    def return_parts(self, last_copy: Event | None, num_parts: int = 1) -> None:
        """Return `num_parts` parts; they may be reused once `last_copy` has completed."""
        if last_copy is not None and last_copy not in self.events:
            self.events.append(last_copy)
        self.num_parts -= num_parts
        if self.num_parts == 0:
            if self.copied_in is not None and self.copied_in not in self.events:
                self.events.append(self.copied_in)
            self._pool.return_lease(self._lease, self.events)


def lend(pool: HostPool, sizes: list[int]) -> tuple[GroupLease, list[HostRegion]] | None:
    """Lend one region for each of `sizes` from one lease.

    Args:
        pool: lends the bytes.
        sizes: bytes of each region.

    Returns:
        The lease and its regions; None if the host tier has no room.
    """
    alignment = pool.alignment
    total = 0
    for nbytes in sizes:
        total += (nbytes + alignment - 1) & -alignment
    lease = pool.lend(total)
    if lease is None:
        return None
    slab, offset = lease.region.slab, lease.region.offset
    regions = []
    for nbytes in sizes:
        regions.append(HostRegion(slab, offset, nbytes))
        offset += (nbytes + alignment - 1) & -alignment
    return GroupLease(pool, lease, len(regions)), regions
