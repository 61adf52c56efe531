# SPDX-License-Identifier: Apache-2.0
"""`ActivationStore`: owns every saved storage, from pack until autograd drops its last handle."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload_engine._compat.tensor_reads import Reads
from offload_engine._host.pool import HostPool
from offload_engine._host.unawaited import UnawaitedCopies
from offload_engine._observe.reasons import Reason
from offload_engine._saved.abandon import abandon
from offload_engine._saved.alloc_streams import AllocStreams
from offload_engine._saved.counters import ByteCounters
from offload_engine._saved.eligibility import Eligibility, Lasting
from offload_engine._saved.failures import CopyFailures
from offload_engine._saved.group_moves import GroupMoves
from offload_engine._saved.handles import PackedTensor
from offload_engine._saved.mover import StorageMover
from offload_engine._saved.retirement import RetireQueue
from offload_engine._saved.storage import (
    COPYING_OUT,
    ON_HOST,
    RESIDENT,
    RETIRED,
    SavedStorage,
    TensorGroup,
)
from offload_engine._saved.transfers import TransferContext, record_last_read
from offload_engine._saved.unpacked import UnpackedTensors, check_not_overwritten
from offload_engine.config import OffloadConfig
from offload_engine.errors import OffloadError
from offload_engine.planning.moves import IN
from offload_engine.stats import IterationStats


class ActivationStore:
    """Owns every saved storage. Its operations, and those of the executor, take turns: see `RetireQueue`.

    Attributes:
        counters: bytes saved and resident.
        failures: copies that failed.
        eligibility: decides which tensors may move.
        alloc_streams: allocating streams of tensors that another stream saves.
        live: storages with a handle left.
        moves: moves groups between device and host.
        retired: queues storages whose last handle was dropped, and retires them after an operation.
    """

    def __init__(
        self,
        context: TransferContext,
        pool: HostPool,
        unawaited: UnawaitedCopies,
        counters: ByteCounters,
        config: OffloadConfig,
        lasting: Lasting,
    ) -> None:
        self.counters: ByteCounters = counters
        self.eligibility: Eligibility = Eligibility(context.device.torch_device, config.min_tensor_bytes, lasting)
        self.alloc_streams: AllocStreams = AllocStreams()
        self._mover = StorageMover(context, pool, unawaited, self.counters, config.host_policy == "error")
        self.live: dict[SavedStorage, None] = self._mover.live
        self._by_key = self._mover.by_key
        self.failures: CopyFailures = self._mover.failures
        self.retired: RetireQueue = RetireQueue(context.device.is_copy_thread, self._mover.retire, self.failures)
        self.moves: GroupMoves = GroupMoves(self._mover, context)
        self._lock = self.retired.lock
        self._dropped = self.retired.dropped
        self.context: TransferContext = context  # the engine and the executor reach recorder and ranges by it
        self._current_stream = context.device.current_stream  # bound once, like the next: called for each tensor
        self._pool = pool
        self._unpacked = UnpackedTensors(context.device.torch_device)

    # -- iterations --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Reset the counters for an iteration."""
        self.counters.begin()
        self.eligibility.begin()
        with self.retired:  # notes an interrupt, by which a lease that is returned may be lost
            self._pool.reset_peak()
        self.alloc_streams.clear()

    def end(self) -> IterationStats:
        """End an iteration: return its statistics, complete."""
        self.eligibility.clear()
        self.alloc_streams.clear()
        stats = self.counters.stats
        stats.peak_host_bytes = self._pool.peak_lent_bytes
        stats.host_bytes = self._pool.slab_bytes_total
        stats.num_storages_left = len(self.live)
        return stats

    def abandon_all(self) -> None:
        """Wait for every copy, then abandon every storage, whatever state an exception has left it in.

        Handles that autograd still holds cannot be unpacked afterwards, and the store must be replaced by a new one. If
        an interrupt ends this call, call it again.
        """
        self.failures.tear()  # until the store is replaced: also if this is interrupted
        with self._lock:
            self._by_key.clear()  # before the addresses may be used again
            abandon(list(self.live), self.counters, self.context)
            self.live.clear()

    def has_handles(self) -> bool:
        """Return whether a graph still holds a handle.

        Raises:
            KeyboardInterrupt: if one came while a handle was freed.
        """
        self.failures.raise_deferred()
        self.retired.check(self.live)
        return bool(self.live)

    def check_handles(self, group: TensorGroup) -> None:
        """Check that no handle of a group, whose backward should be over, was lost.

        Raises:
            KeyboardInterrupt: if one came while a handle was freed.
        """
        self.retired.check(list(group.storages))

    @property
    def lent_bytes(self) -> int:
        """Return the host bytes that are lent now."""
        self.retire_dropped()
        return self._pool.lent_bytes

    def retire_dropped(self) -> None:
        """Retire the storages whose last handle was dropped since the last operation."""
        self.retired.drain()

    # -- saved tensors -----------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor, group: TensorGroup) -> PackedTensor | torch.Tensor:
        """Return what autograd keeps for `tensor`: a handle, or the tensor itself if its bytes must not move."""
        # In line, and without `with self.retired`: it runs for each saved tensor, and a call costs as much as its work.
        found, recorder = self.eligibility.read_movable(tensor), self.context.recorder
        if found is None or found[2] < group.min_bytes:
            if recorder is not None:
                reason = self.eligibility.reason_to_stay(tensor) or Reason.TOO_SMALL
                recorder.note_saved(tensor, group, reason=reason)
            return self.eligibility.staying(tensor)
        key, is_ungrouped, is_first = found[1], group.is_ungrouped, False
        try:
            with self._lock:
                saved = self._by_key.get(key)
                if saved is None or _is_another_save(saved, found):
                    saved = self._by_key[key] = SavedStorage(tensor, found, group, self._current_stream())
                    is_first = True
                    self.live[saved] = None
                    if self.alloc_streams.streams:
                        self.alloc_streams.apply_to(saved)
                    if self.counters.is_metered:
                        self.counters.hold([saved])
                    if not is_ungrouped:
                        self.counters.count_managed(saved.nbytes)
                elif saved.group.is_ungrouped and not is_ungrouped:
                    saved.group = group
                    self.counters.count_managed(saved.nbytes)
                if not is_ungrouped:
                    group.add(saved)
                if recorder is not None:
                    recorder.note_saved(tensor, group, storage=saved)
                return PackedTensor(tensor, found, saved, self.retired, is_first)
        except BaseException:
            self.failures.tear()  # for any exception: there may be a storage without a handle
            raise
        finally:
            if self._dropped:
                self.retired.drain()

    def note_staying(self, tensor: torch.Tensor, group: TensorGroup, reason: Reason) -> None:
        """Record why a tensor that never reaches `pack` stays. No-op unless the step is recorded."""
        if self.context.recorder is not None:
            self.context.recorder.note_saved(tensor, group, reason=reason)

    def note_excluded(self, tensor: torch.Tensor, group: TensorGroup) -> None:
        """Record that the chunk's checker rejected a tensor, such as a weight. No-op unless the step is recorded."""
        if self.context.recorder is not None:
            self.note_staying(tensor, group, self.eligibility.reason_to_stay(tensor) or Reason.EXCLUDED)

    def would_start_storage(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` would move and no group has saved its storage yet."""
        found = self.eligibility.read_movable(tensor)
        if found is None:
            return False
        with self.retired, self._lock:
            saved = self._by_key.get(found[1])
            return saved is None or saved.group.is_ungrouped or _is_another_save(saved, found)

    def unpack(self, handle: PackedTensor) -> torch.Tensor:
        """Return the tensor that `handle` stands for, ready for the current stream.

        Raises:
            OffloadError: if `reset_iteration()` abandoned it.
            RuntimeError: as autograd itself, if it was modified in place after it was saved, also by a backward.
            CopyError: if its copy failed.
        """
        saved = handle.storage
        if saved.residency is not RESIDENT:
            self._bring_back(saved)
        if saved.copied_in is None:
            tensor = self._unpacked.uncopied(saved, handle)
        else:
            if saved.ready_on != self._current_stream():
                self._mover.await_copy_in([saved])
            buffer = saved.buffer
            assert buffer is not None
            if buffer._version != saved.arrived_version or saved.views is not None:
                check_not_overwritten(saved, handle)
            if handle.has_storage_spec and saved.spec is not None:
                # Only the last handle gets the buffer itself: a backward may discard the bytes that it was given.
                tensor = buffer if len(saved.handles) == 1 else buffer.detach()
            else:
                tensor = self._unpacked.view(saved, handle)
        if saved.lease is not None:  # the bytes are on host, or on their way there
            self._hand_over(saved)
        return tensor

    def empty_for_holders(self, holders: Sequence[torch.Tensor], num_copies: int) -> None:
        """Declare that `holders`, tensors over one storage, are not read again before its backward; see the engine."""
        with self.retired, self._lock:
            saved = self._by_key.get(holders[0].untyped_storage()._cdata)
            if saved is None or saved.emptied is not None or saved.version != holders[0]._version:
                return
            if saved.residency not in (COPYING_OUT, ON_HOST):
                return
            tensors = [tensor for holder in holders for tensor in (holder, holder._base) if tensor is not None]
            saved.num_external_refs = len(set(map(id, tensors))) + num_copies
            record_last_read(saved, self.context)
            if saved.residency is ON_HOST:  # released already, but the holders have kept its bytes
                self._mover.hold_again(saved, holders[0])
                self._mover.release_or_empty([saved])

    # -- private -----------------------------------------------------------------------------------------------------

    def _bring_back(self, saved: SavedStorage) -> None:
        """Recall or copy in a storage that prefetch missed, and make the current stream wait for it."""
        if saved.residency is RETIRED:
            raise OffloadError(f"a saved tensor of {saved.group} was abandoned by reset_iteration(); run forward again")
        with self.retired, self._lock:
            if saved.residency is COPYING_OUT:
                self._note_copy_in(saved)
                self._mover.recall(saved)
                return
            if saved.residency is ON_HOST:
                self.counters.stats.prefetch_misses += 1
                self._note_copy_in(saved)
                self._mover.copy_in([saved])
            self._mover.await_copy_in([saved])

    def _note_copy_in(self, saved: SavedStorage) -> None:
        if self.context.recorder is not None:
            self.context.recorder.note_move(IN, saved.group, saved.nbytes)

    def _hand_over(self, saved: SavedStorage) -> None:
        """Hand the buffer over to the tensor just made from it, unless another handle may need it soon."""
        with self.retired, self._lock:
            if saved.may_be_handed_over() and self._current_stream() == saved.stream:
                self._mover.hand_over(saved)


def _is_another_save(saved: SavedStorage, found: Reads) -> bool:
    """Return whether the tensor that `found` was read from may have other bytes than `saved`, of the same storage."""
    return saved.version != found[4] or (saved.is_leaving and not saved.has_bytes_at(found[5]))
