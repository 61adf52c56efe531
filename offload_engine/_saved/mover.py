# SPDX-License-Identifier: Apache-2.0
"""`StorageMover`: performs each transition of a saved storage from one residency to the next."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch

from offload_engine._devices.base import CopyError, Event
from offload_engine._host.leases import GroupLease, lend
from offload_engine._host.pool import HostPool
from offload_engine._host.unawaited import UnawaitedCopies
from offload_engine._observe.reasons import Reason
from offload_engine._saved.counters import ByteCounters
from offload_engine._saved.failures import CopyFailures
from offload_engine._saved.storage import (
    COPYING_IN,
    COPYING_OUT,
    ON_HOST,
    RESIDENT,
    RETIRED,
    Residency,
    SavedStorage,
    TensorGroup,
    move,
)
from offload_engine._saved.transfers import (
    TransferContext,
    await_copy_in,
    copy_in,
    copy_out,
    empty_buffer,
    hand_over_buffer,
    release_buffer,
    wait_for_last_copy,
)
from offload_engine.errors import OffloadError

logger = logging.getLogger(__name__)


class CopyOut:
    """Storages of one group whose copy-out was issued together."""

    __slots__ = ("group", "storages", "nbytes", "copied_out", "number")

    def __init__(self, group: TensorGroup, storages: list[SavedStorage], nbytes: int, copied_out: Event) -> None:
        self.group = group
        self.storages = storages
        self.nbytes = nbytes
        self.copied_out = copied_out
        self.number: int = 0  # position in the order of issue; set by the queue


class StorageMover:
    """Moves storages between device and host. Its callers hold the store's lock.

    Args:
        context: device and copy streams.
        pool: lends host bytes.
        unawaited: copy-ins that compute has not been made to wait for.
        counters: count the bytes that move.
        is_room_required: a group without host room is an error.

    Attributes:
        live: storages with a handle left.
        by_key: storages that may be saved again, by address, as long as a tensor with that address may exist. The store
            adds them.
        failures: copies that failed.
    """

    def __init__(
        self,
        context: TransferContext,
        pool: HostPool,
        unawaited: UnawaitedCopies,
        counters: ByteCounters,
        is_room_required: bool,
    ) -> None:
        self.live: dict[SavedStorage, None] = {}
        self.by_key: dict[object, SavedStorage] = {}
        self.counters: ByteCounters = counters
        self.failures: CopyFailures = CopyFailures()
        self._is_room_required = is_room_required
        self._context = context
        self._pool = pool
        self._unawaited = unawaited

    def copy_out(self, group: TensorGroup, produced: Sequence[Event] | None) -> CopyOut | None:
        """Issue the copy-out of the own storages of `group`; None if there is nothing to copy or no host room.

        Storages that were copied in stay: they are about to be used, and other streams may have waited for them.

        Raises:
            OffloadError: if there is no host room and `is_room_required`.
        """
        storages, nbytes = _movable(group)
        if self._context.recorder is not None:
            self._note_modified(group.storages)
        if not storages:
            return None
        lent = lend(self._pool, [saved.nbytes for saved in storages])
        if lent is None:
            self._count_no_room(group, nbytes)
            return None
        lease, regions = lent
        for saved, region in zip(storages, regions):  # noqa: B905  (as many by construction)
            saved.lease, saved.region = lease, region
        copied_out = copy_out(storages, lease, produced, self._context)
        for saved in storages:
            saved.pending = saved.copied_out = copied_out
            saved.is_leaving = True
        self._move(storages, COPYING_OUT)
        self.counters.stats.copied_out_bytes += nbytes
        self.counters.stats.num_offloaded_groups += 1
        return CopyOut(group, storages, nbytes, copied_out)

    def release(self, storages: list[SavedStorage]) -> None:
        """Release the device bytes of storages copied out together, unless recalled, modified or retired since.

        Raises:
            CopyError: if the copy-out failed; names the group.
        """
        leaving = [s for s in storages if s.residency is COPYING_OUT and not s.is_modified()]
        if self._context.recorder is not None:
            self._note_modified(storages)
        self._wait_for_copy_out(leaving)
        self.release_or_empty(leaving)

    def release_or_empty(self, storages: list[SavedStorage]) -> None:
        """Release or empty buffers whose copy-out is complete; recall those that undeclared references hold."""
        for saved in storages:
            if saved.num_external_refs is None:
                if not saved.pin_address() and saved.has_address:
                    self._forget_address(saved)
                self.counters.count_release(saved)
                release_buffer(saved, self._context)
            elif saved.may_be_emptied():
                self.counters.count_release(saved)
                empty_buffer(saved, self._context)
                self.counters.stats.num_emptied_storages += 1
            else:
                self.recall(saved)
                self.counters.stats.num_viewed_storages += 1
                if self._context.recorder is not None:
                    self._context.recorder.note_storage_stays(saved, Reason.SHARED)
        self._move([saved for saved in storages if saved.residency is COPYING_OUT], ON_HOST)

    def recall(self, saved: SavedStorage) -> None:
        """Keep a storage that is being copied out on the device."""
        # Its copy-out still reads the buffer, so `pending` stays set until the buffer is released.
        self._move([saved], RESIDENT)
        if not saved.group.is_read_once:
            return_region(saved, saved.copied_out)

    def copy_in(self, storages: list[SavedStorage]) -> None:
        """Issue the copy-in of storages on host; return their leases at once, with the event of the copy.

        Storages that are read once keep their leases, because they may have to be copied in again.
        """
        copied_in = copy_in(storages, self._context)
        self._unawaited.add(copied_in)
        total = 0
        for saved in storages:
            saved.pending = saved.copied_in = copied_in
            total += saved.nbytes
        self._move(storages, COPYING_IN)
        _return_regions(storages, copied_in)
        self.counters.count_copy_in(total)
        if self.counters.is_metered:
            self.counters.hold(storages)

    def await_copy_in(self, storages: list[SavedStorage]) -> None:
        """Make the current stream wait for the copy-in of `storages`, issued together.

        Raises:
            CopyError: if the copy-in failed; names the group.
        """
        try:
            await_copy_in(storages, self._context)
        except CopyError as error:
            raise self.failures.failed(error, "copy-in", storages[0]) from error
        arrived = [saved for saved in storages if saved.residency is COPYING_IN]
        self._end_prefetch(arrived)
        self._move(arrived, RESIDENT)

    def hand_over(self, saved: SavedStorage) -> None:
        """Hand the buffer over to the tensor just made from it, and count the storage as on host.

        Raises:
            CopyError: if the copy-out of a recalled storage failed.
        """
        # Only a recalled storage has a copy-out: issued before the first run of the function to be recomputed now.
        self._wait_for_copy_out([saved])
        if saved.copied_in is None:  # the buffer is the one saved in forward
            saved.pin_address()
        self.counters.count_release(saved)
        hand_over_buffer(saved)
        self._move([saved], ON_HOST)

    def hold_again(self, saved: SavedStorage, holder: torch.Tensor) -> None:
        """Undo the release of a buffer whose bytes an outside reference, `holder`, kept on the device."""
        saved.buffer, saved.storage, saved.spec = holder.detach(), holder.untyped_storage(), None
        saved.is_as_saved = False
        self.counters.hold([saved])
        self.counters.count_arrival(saved.nbytes)
        self._move([saved], COPYING_OUT)

    def restore(self, saved: SavedStorage) -> None:
        """Refill an emptied storage for its remaining holders, because its graph was freed without a backward."""
        try:
            self.copy_in([saved])
        except torch.OutOfMemoryError as error:  # for instance while the step ends with such an error
            logger.warning("no memory to refill a tensor of %s that is held elsewhere: %s", saved.group, error)

    def retire(self, saved: SavedStorage) -> None:
        """Release all memory of `saved`. No-op for a retired storage."""
        if saved.residency is RETIRED:
            return
        if saved.emptied is not None and saved.is_still_held():
            self.restore(saved)
        if saved.buffer is not None and saved.pending is not None:
            self._wait_or_defer(saved)  # first: if an interrupt ends the wait, `retire` is called again
        if saved.residency is COPYING_IN:
            self._end_prefetch([saved])
        if saved.buffer is not None:
            self.counters.count_release(saved)
            release_buffer(saved, self._context)
        if saved.lease is not None:
            return_region(saved, saved.copied_out)
        self._move([saved], RETIRED)
        if not saved.group.is_ungrouped:
            self.counters.saved_bytes -= saved.nbytes
        # Breaks the reference cycle of storage and groups, which would keep the events of its copies alive.
        if saved in saved.group.storages:  # looked up and deleted, as below: `pop` takes twice as long
            del saved.group.storages[saved]
        for group in saved.sharers:
            group.storages.pop(saved, None)
        if saved.has_address:
            self._forget_address(saved)
        if saved.pin is not None:
            saved.unpin_address()
        if saved in self.live:
            del self.live[saved]

    def _move(self, storages: list[SavedStorage], to: Residency) -> None:
        move(storages, to)
        recorder = self._context.recorder
        if recorder is not None:
            for saved in storages:
                recorder.note_residency(saved, to)

    def _note_modified(self, storages: Iterable[SavedStorage]) -> None:
        recorder = self._context.recorder
        if recorder is not None:
            for saved in storages:
                if saved.copied_in is not None:  # for an earlier backward; `buffer` is not what was saved
                    continue
                if saved.residency in (RESIDENT, COPYING_OUT) and saved.is_modified():
                    recorder.note_storage_stays(saved, Reason.MODIFIED)

    def _count_no_room(self, group: TensorGroup, nbytes: int) -> None:
        self.counters.stats.num_host_limit_groups += 1
        if self._context.recorder is not None:
            self._context.recorder.note_group_stays(group, Reason.NO_ROOM)
        if self._is_room_required:
            pool = self._pool
            raise OffloadError(
                f"{group} needs {nbytes:,} bytes of host memory, and at most {pool.room_bytes:,} can be lent at once "
                f"(the pool holds {pool.slab_bytes_total:,}, of which {pool.lent_bytes:,} are lent). Raise "
                "host_limit_bytes, offload less, or set host_policy='keep' to leave such groups on the device."
            )

    def _end_prefetch(self, storages: list[SavedStorage]) -> None:
        for saved in storages:
            self.counters.prefetched_bytes -= saved.nbytes
        if storages:  # copied in together
            self._unawaited.forget(storages[0].copied_in)

    def _forget_address(self, saved: SavedStorage) -> None:
        saved.has_address = False
        if self.by_key.get(saved.key) is saved:
            del self.by_key[saved.key]

    def _wait_for_copy_out(self, storages: list[SavedStorage]) -> None:
        try:
            wait_for_last_copy(storages, self._context)
        except CopyError as error:
            raise self.failures.failed(error, "copy-out", storages[0]) from error

    def _wait_or_defer(self, saved: SavedStorage) -> None:
        try:
            wait_for_last_copy([saved], self._context)
        except CopyError as error:
            # The bytes are no longer needed, and a failed copy no longer touches them. But this may run inside a
            # destructor, which cannot raise: the next boundary does.
            self.failures.defer(error, saved)
            saved.pending = saved.copied_out = None


def return_region(saved: SavedStorage, last_copy: Event | None) -> None:
    """Return the host bytes of a storage to the pool; they may be reused once `last_copy` has completed."""
    lease, saved.lease = saved.lease, None
    assert lease is not None
    lease.return_parts(last_copy)


def _return_regions(storages: list[SavedStorage], last_copy: Event) -> None:
    """Return the regions of storages that are not read once, with one call per lease (mostly one for all)."""
    returned: GroupLease | None = None
    num_parts = 0
    for saved in storages:
        lease = saved.lease
        assert lease is not None
        if saved.group.is_read_once:
            lease.copied_in = last_copy
            continue
        saved.lease = None
        if lease is not returned and returned is not None:
            returned.return_parts(last_copy, num_parts)
            num_parts = 0
        returned = lease
        num_parts += 1
    if returned is not None:
        returned.return_parts(last_copy, num_parts)


def _movable(group: TensorGroup) -> tuple[list[SavedStorage], int]:
    """Return the own storages of `group` that can be copied out now, and their bytes."""
    storages, nbytes = [], 0
    for saved in group.storages:
        if (
            saved.group is group
            and saved.residency is RESIDENT
            and saved.copied_in is None
            and saved.lease is None
            and not saved.is_modified()
        ):
            storages.append(saved)
            nbytes += saved.nbytes
    return storages, nbytes
