"""The activation store: each step of a saved storage from one place to another."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload_engine._devices.base import Event, Stream
from offload_engine._host.leases import give_up_region, give_up_regions, lend
from offload_engine._host.pool import HostPool
from offload_engine._saved.accounts import Accounts
from offload_engine._saved.eligibility import Eligibility
from offload_engine._saved.handles import PackedTensor
from offload_engine._saved.retirement import Retirement
from offload_engine._saved.storage import COPYING_IN, COPYING_OUT, ON_HOST, RESIDENT, RETIRED, SavedStorage, TensorGroup
from offload_engine._saved.transfers import (
    TransferContext,
    await_copy_in,
    copy_in,
    copy_out,
    drop_buffer,
    empty_buffer,
    hand_over_buffer,
    note_last_read,
    note_produced,
    settle,
)
from offload_engine.config import OffloadConfig
from offload_engine.errors import CopyError, OffloadError
from offload_engine.meter import ResidencyMeter
from offload_engine.stats import IterationStats

logger = logging.getLogger(__name__)


class CopyOut:
    """Storages of one group whose copy-out was issued together."""

    __slots__ = ("group", "storages", "nbytes", "copied_out")

    def __init__(self, group: TensorGroup, storages: list[SavedStorage], nbytes: int, copied_out: Event) -> None:
        self.group = group
        self.storages = storages
        self.nbytes = nbytes
        self.copied_out = copied_out


class ActivationStore(Retirement):
    """Owns every saved storage from the moment it is packed until autograd drops its last handle.

    Attributes:
        accounts: how many bytes are where.
        eligibility: which tensors may move.
        live: storages with a handle left.
        has_failed: a copy has failed, and nothing was reset since.
    """

    def __init__(
        self, context: TransferContext, pool: HostPool, meter: ResidencyMeter | None, config: OffloadConfig
    ) -> None:
        super().__init__(context.device.is_copy_thread)
        self.accounts: Accounts = Accounts(meter, config.resident_bytes)
        self.eligibility: Eligibility = Eligibility(context.device.torch_device, config.min_tensor_bytes)
        self.live: dict[SavedStorage, None] = {}
        self.has_failed: bool = False
        self._context = context
        self._torch_device = context.device.torch_device
        self._current_stream = context.device.current_stream  # bound once, as the next: each tensor asks
        self._movable_storage = self.eligibility.movable_storage
        self._pool = pool
        self._ahead = pool.ahead
        self._is_room_required = config.host_policy == "error"
        self._empties: dict[torch.dtype, torch.Tensor] = {}
        self._by_key: dict[int, SavedStorage] = {}
        self._homes: dict[int, tuple[StorageWeakRef, Stream]] = {}
        self._failure: CopyError | None = None  # of a copy whose storage is gone, not raised yet

    def begin(self, weights: Iterable[torch.Tensor]) -> None:
        """Start counting anew; the storages of `weights` are not activations."""
        self.accounts.begin()
        self.eligibility.begin(weights)
        self._pool.reset_peak()
        self._homes.clear()

    def finish(self) -> IterationStats:
        """Complete the statistics of the iteration."""
        self.eligibility.clear()
        self._homes.clear()
        stats = self.accounts.stats
        stats.peak_host_bytes = self._pool.peak_lent_bytes
        stats.host_bytes = self._pool.slab_bytes_total
        stats.num_storages_left = len(self.live)
        return stats

    def note_home(self, tensor: torch.Tensor, stream: Stream) -> None:
        """The bytes of `tensor` go back to the pool of `stream`, whichever stream saves them."""
        storage = tensor.untyped_storage()
        self._homes[storage._cdata] = StorageWeakRef(storage), stream

    def empty_for_holders(self, holders: Sequence[torch.Tensor], num_copies: int) -> None:
        """Nobody reads `holders`, tensors over one storage, until its backward: release it in spite of them."""
        with self, self._lock:
            saved = self._by_key.get(holders[0].untyped_storage()._cdata)
            if saved is None or saved.emptied is not None or saved.version != holders[0]._version:
                return
            if saved.residency not in (COPYING_OUT, ON_HOST):
                return
            tensors = [tensor for holder in holders for tensor in (holder, holder._base) if tensor is not None]
            saved.num_holders = len(set(map(id, tensors))) + num_copies
            note_last_read(saved, self._context)
            if saved.residency is ON_HOST:  # released already, but its bytes are still there
                self._hold_again(saved, holders[0])
                self._let_go(saved)

    def pack(self, tensor: torch.Tensor, group: TensorGroup) -> PackedTensor | torch.Tensor:
        """What autograd keeps for `tensor`: a handle, or the tensor itself where its bytes must not move."""
        # Long, and without the decorator, because it runs for each saved tensor: a call costs as much as what it does.
        storage = self._movable_storage(tensor)
        if storage is None:
            return self.eligibility.staying(tensor)
        key, is_rest, is_first = storage._cdata, group.is_rest, False
        try:
            with self._lock:
                saved = self._by_key.get(key)
                if (
                    saved is None
                    or saved.version != tensor._version
                    or (saved.is_leaving and saved.may_lack_writes_to(tensor))
                ):
                    saved = self._by_key[key] = SavedStorage(tensor, storage, group, self._current_stream())
                    is_first = True
                    self.live[saved] = None
                    if self._homes:
                        self._find_home(saved)
                    if self.accounts.is_metered:
                        self.accounts.hold([saved])
                    if not is_rest:
                        self.accounts.note_managed(saved.nbytes)
                elif saved.group.is_rest and not is_rest:
                    saved.group = group
                    self.accounts.note_managed(saved.nbytes)
                if not is_rest:
                    group.add(saved)
                return PackedTensor(tensor, saved, self, is_first)
        finally:
            if self._dropped:
                self._retire_dropped()

    def unpack(self, handle: PackedTensor) -> torch.Tensor:
        """The tensor that `handle` stands for, ready for the current stream.

        Raises:
            OffloadError: if `reset_iteration()` dropped it.
            RuntimeError: if it was modified in place after it was saved, as autograd itself would.
            CopyError: if a copy of it failed.
        """
        saved = handle.storage
        if saved.residency is not RESIDENT:
            self._bring_back(saved)
        if saved.copied_in is None:
            self._check_unmodified(saved)
        elif saved.ready_on != self._current_stream():
            self._await([saved])
        assert saved.buffer is not None
        if handle.gives_form and saved.form is not None:
            tensor = saved.buffer.data  # unlike detach(), with a version counter of its own
        else:
            empty = self._empties.get(handle.dtype)
            if empty is None:
                empty = self._empties[handle.dtype] = torch.empty(0, dtype=handle.dtype, device=self._torch_device)
            tensor = handle.view(saved.buffer, empty)
        if saved.lease is not None:  # the bytes are on host, or on their way there
            self._hand_over(saved)
        return tensor

    def note_produced(self, group: TensorGroup) -> list[Event]:
        """For a copy-out that is issued later: events behind what has been computed of `group` by now."""
        with self, self._lock:
            storages = list(group.storages)
            for saved in storages:
                saved.is_leaving = True
            return note_produced(storages, self._context) if storages else []

    def issue_copy_out(self, group: TensorGroup, produced: Sequence[Event] | None = None) -> CopyOut | None:
        """Copy out what no group saved before `group`; returns what is now being copied (None where there is no room).

        What has been copied in stays: it is about to be used, and other streams may have waited for it than this one.

        Args:
            group: whose own storages are copied.
            produced: as `note_produced` gave it when the group committed; None: it commits now.
        """
        with self, self._lock:
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
            if not storages:
                return None
            lease = lend(self._pool, storages, self._context.device.host_alignment)
            if lease is None:
                self._note_no_room(group, nbytes)
                return None
            if produced is None:
                produced = note_produced(storages, self._context)
            copied_out = copy_out(storages, lease, produced, self._context)
            for saved in storages:
                saved.pending = saved.copied_out = copied_out
                saved.residency, saved.is_leaving = COPYING_OUT, True
            self.accounts.stats.copied_out_bytes += nbytes
            self.accounts.stats.num_offloaded_groups += 1
            return CopyOut(group, storages, nbytes, copied_out)

    def release(self, storages: Sequence[SavedStorage]) -> None:
        """Drop the device bytes of storages copied out together, but for those recalled or gone since.

        Raises:
            CopyError: if the copy-out failed; names the group.
        """
        with self, self._lock:
            leaving = [s for s in storages if s.residency is COPYING_OUT and not s.is_modified()]
            try:
                settle(leaving, self._context)
            except CopyError as error:
                raise self._failed(error, "copy-out", leaving[0]) from error
            for saved in leaving:
                self._let_go(saved)

    def recall(self, group: TensorGroup) -> None:
        """`group` is needed soon: what is still being copied out stays on the device, where its bytes still are."""
        with self, self._lock:
            for saved in group.storages:
                if saved.residency is COPYING_OUT:
                    self._keep(saved)

    def issue_copy_in(self, storages: Iterable[SavedStorage]) -> None:
        """Copy in what is on host; the leases go back at once, together with the event of the copy.

        Not those of what is read once, which may have to be copied in again.
        """
        with self, self._lock:
            on_host = [saved for saved in storages if saved.residency is ON_HOST]
            if on_host:
                self._issue_copy_in(on_host)

    def await_copy_in(self, group: TensorGroup) -> None:
        """The backward of `group` begins: the current stream waits for its copy-in, if one is issued.

        Raises:
            CopyError: if the copy-in failed; names the group.
        """
        with self, self._lock:
            arriving = [saved for saved in group.storages if saved.residency is COPYING_IN]
            if arriving:
                self._await(arriving)

    def raise_failure(self) -> None:
        """Raise the failure of a copy whose storage autograd dropped before anybody waited for it.

        Raises:
            CopyError: names the group.
        """
        if self._failure is None:
            return
        failure, self._failure = self._failure, None
        try:
            raise failure
        finally:
            del failure  # else this frame and the error keep each other, and the step's graph, alive

    def abandon_all(self) -> None:
        """Wait for every copy, then drop every storage. Handles that autograd still has can no longer be unpacked."""
        with self, self._lock:
            self._wait_for_copies()
            # What must be restored last: the memory for it is there when all else has gone.
            for saved in sorted(self.live, key=SavedStorage.is_still_held):
                saved.pending = saved.copied_out = None  # complete, or failed: no copy touches these bytes now
                self._retire(saved)
            self._wait_for_copies()
            self.accounts.prefetched_bytes = 0
            self.eligibility.clear()
            self._homes.clear()
            self._failure = None
            self.has_failed = False

    def _find_home(self, saved: SavedStorage) -> None:
        home = self._homes.get(saved.key)
        if home is not None and home[1] != saved.stream:
            saved.home = home[1]

    def _retire(self, saved: SavedStorage) -> None:
        """No-op for a storage that is gone."""
        if saved.residency is RETIRED:
            return
        if saved.emptied is not None and saved.is_still_held():
            self._restore(saved)
        if saved.buffer is not None and saved.pending is not None:
            self._settle_last(saved)  # first: an interrupt may end the wait, and then all of this comes once more
        if saved.residency is COPYING_IN:
            self.accounts.prefetched_bytes -= saved.nbytes
            self._ahead.pop(id(saved.copied_in), None)
        if saved.buffer is not None:
            self.accounts.drop(saved)
            drop_buffer(saved, self._context)
        if saved.lease is not None:
            give_up_region(saved, saved.copied_out)
        saved.residency = RETIRED
        group = saved.group
        if not group.is_rest:
            self.accounts.saved_bytes -= saved.nbytes
        group.storages.pop(saved, None)  # else the two keep each other, and the events of its copies, alive
        self.live.pop(saved, None)
        if self._by_key.get(saved.key) is saved:
            del self._by_key[saved.key]

    def _let_go(self, saved: SavedStorage) -> None:
        """Drop or empty the buffer of a settled storage that is on host too, unless a view of it is in the way."""
        if saved.num_holders is None:
            if not saved.pin_address() and self._by_key.get(saved.key) is saved:
                del self._by_key[saved.key]
            self.accounts.drop(saved)
            drop_buffer(saved, self._context)
        elif saved.may_be_emptied():
            self.accounts.drop(saved)
            empty_buffer(saved, self._context)
            self.accounts.stats.num_emptied_storages += 1
        else:
            self._keep(saved)
            self.accounts.stats.num_viewed_storages += 1
            return
        saved.residency = ON_HOST

    def _hand_over(self, saved: SavedStorage) -> None:
        """Leave the buffer to the tensor that has just been made of it, unless others may ask for another one soon."""
        with self, self._lock:
            if not saved.may_be_handed_over() or self._current_stream() != saved.stream:
                return
            try:
                # Of what was recalled: its copy-out, issued in front of the function that is about to run once more
                # and long over.
                settle([saved], self._context)
            except CopyError as error:
                raise self._failed(error, "copy-out", saved) from error
            if saved.copied_in is None:  # the buffer is that of the forward
                saved.pin_address()
            self.accounts.drop(saved)
            hand_over_buffer(saved)
            saved.residency = ON_HOST

    def _hold_again(self, saved: SavedStorage, holder: torch.Tensor) -> None:
        """Undo `drop_buffer`, where a holder has kept the bytes there."""
        saved.buffer, saved.form = holder.detach(), None
        self.accounts.hold([saved])
        self.accounts.note_arrival(saved.nbytes)

    def _restore(self, saved: SavedStorage) -> None:
        """The graph goes before its backward: those who still hold the emptied storage shall read what they expect."""
        try:
            self._issue_copy_in([saved])
        except torch.OutOfMemoryError as error:  # as after the one that has ended the step, say
            logger.warning("no memory to restore a tensor that is held elsewhere, of %s: %s", saved.group, error)

    def _wait_for_copies(self) -> None:
        device = self._context.device
        for stream in (self._context.copy_out_stream, self._context.copy_in_stream):
            try:
                device.synchronize(device.record_event(stream))
            except CopyError as error:
                logger.warning("a copy had failed before the reset: %s", error)

    def _issue_copy_in(self, storages: Sequence[SavedStorage]) -> None:
        copied_in = copy_in(storages, self._context)
        self._ahead[id(copied_in)] = copied_in
        total = 0
        for saved in storages:
            saved.residency = COPYING_IN
            saved.pending = saved.copied_in = copied_in
            total += saved.nbytes
        give_up_regions(storages, copied_in)
        self.accounts.note_copied_in(total)
        if self.accounts.is_metered:
            self.accounts.hold(storages)

    def _bring_back(self, saved: SavedStorage) -> None:
        """Have the device bytes there, or on their way: the prefetch did not."""
        with self, self._lock:
            if saved.residency is RETIRED:
                raise OffloadError(
                    f"a saved tensor of {saved.group} was dropped by reset_iteration(); run forward again"
                )
            if saved.residency is COPYING_OUT:
                self._keep(saved)
                return
            if saved.residency is ON_HOST:
                self.accounts.stats.prefetch_misses += 1
                self._issue_copy_in([saved])
            self._await([saved])

    def _await(self, storages: Sequence[SavedStorage]) -> None:
        try:
            await_copy_in(storages, self._context)
        except CopyError as error:
            raise self._failed(error, "copy-in", storages[0]) from error
        for saved in storages:
            if saved.residency is COPYING_IN:
                saved.residency = RESIDENT
                self.accounts.prefetched_bytes -= saved.nbytes
                self._ahead.pop(id(saved.copied_in), None)

    def _check_unmodified(self, saved: SavedStorage) -> None:
        if saved.is_modified():
            raise RuntimeError(
                f"a tensor saved for backward by {saved.group} has been modified by an inplace operation since; "
                "clone it before the modification"
            )

    def _settle_last(self, saved: SavedStorage) -> None:
        try:
            settle([saved], self._context)
        except CopyError as error:
            # Nobody needs these bytes any more, and a failed copy no longer touches them. But this may run inside a
            # destructor, which cannot raise: the next boundary of a group does (`raise_failure`).
            self._failure = self._failure or self._failed(error, "copy", saved)
            saved.pending = saved.copied_out = None

    def _note_no_room(self, group: TensorGroup, nbytes: int) -> None:
        self.accounts.stats.num_host_limit_groups += 1
        if self._is_room_required:
            raise OffloadError(
                f"{group} needs {nbytes:,} bytes of host memory, and at most {self._pool.room_bytes:,} can be lent at "
                f"once (the pool holds {self._pool.slab_bytes_total:,}, of which {self._pool.lent_bytes:,} are lent). "
                "Raise host_limit_bytes, offload less, or set host_policy='keep' to leave such groups on the device."
            )

    def _keep(self, saved: SavedStorage) -> None:
        # Its copy-out still reads the buffer: `pending` stays, for the day the buffer is dropped.
        saved.residency = RESIDENT
        if not saved.group.is_read_once:
            give_up_region(saved, saved.copied_out)

    def _failed(self, error: CopyError, copy: str, saved: SavedStorage) -> CopyError:
        self.has_failed = True
        return CopyError(
            f"the {copy} of {saved.group} failed: {error}. Model parameters are untouched; "
            "remove the cause, call reset_iteration() and run the step again."
        )
