# SPDX-License-Identifier: Apache-2.0
"""`Recorder`: notes the calls of the engine in one step, and makes a `StepRecord` from them."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch

from offload_engine._devices.base import Device, Stream, TimeMark
from offload_engine._observe.assemble import About, Origin, assemble, lag_ms, waits_of
from offload_engine._observe.modules import ModuleHooks
from offload_engine._observe.notes import (
    NotedBoundary,
    NotedCopy,
    NotedGroup,
    NotedMove,
    NotedSave,
    NotedWait,
    Notes,
    ObservedGroup,
    ObservedStorage,
    key_of,
)
from offload_engine._observe.pace import Pace
from offload_engine._observe.pending import PendingRecord
from offload_engine._observe.reasons import Reason
from offload_engine._observe.record import Awaited, StepRecord, WaitRecord
from offload_engine._observe.storages import StorageLog
from offload_engine.planning.moves import COMMIT, FORWARD, HELD, LAUNCH, BoundaryKind, GroupKey, Op
from offload_engine.schedule import ChunkKey


class Recorder:
    """Records one step. Made when the step begins, whether or not the device is idle; never waits for the device.

    Each `note_` call appends to a list: about a microsecond, and a few more for each time mark on a GPU. It holds no
    tensor, and a storage only until that retires. The engine calls `finish` or `close` at the end of the step.

    Args:
        device: marks time.
        rank: rank of this process.
        step: number of the step, for the reader.
        pipeline: rank and number of ranks of the pipeline.
        fallback: why a group stayed that is neither kept nor copied out by any move.
        modules: hooks on all modules, which know the running one; removed at the end. None: no names. Compiled modules
            are compiled again because of them.
        compares_clocks: measure, when the record is made, how far the device was behind the host. This blocks until the
            device has done all queued work, and clocks drift apart, so make the record soon.
        clock: returns the host time in nanoseconds, from any origin.
    """

    def __init__(
        self,
        device: Device,
        *,
        rank: int = 0,
        step: int = 0,
        pipeline: tuple[int, int] = (0, 1),
        fallback: Reason = Reason.FITS,
        modules: ModuleHooks | None = None,
        compares_clocks: bool = False,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._device = device
        self._about = About(rank, step, pipeline, fallback)
        self._clock = clock
        self._compares_clocks = compares_clocks
        self._notes = Notes()
        self._boundary: NotedBoundary | None = None
        self._num_committed: dict[ChunkKey | None, int] = {}
        self._forward: ChunkKey | None = None  # the chunk whose forward began last
        self._storages = StorageLog(device, self._notes)
        self._modules = modules
        self._stream = device.current_stream()
        self._origin = Origin(device, device.mark_time(self._stream), host_ns=clock(), unix_ns=time.time_ns())

    # -- moves -------------------------------------------------------------------------------------------------------

    def note_boundary(self, kind: BoundaryKind, chunk: ChunkKey | None, group: ObservedGroup | None = None) -> None:
        """Note a boundary; moves noted from now on happen at it.

        Args:
            kind: kind of the boundary.
            chunk: its chunk; None at the end of the iteration, or if the caller does not know it: then the one whose
                forward runs.
            group: its group; None if it has none.
        """
        if kind is FORWARD:
            self._forward = chunk
        index = -1
        if group is not None:
            self.note_group(group)
            index = group.index
            if kind is COMMIT:
                self._num_committed[chunk] = index + 1
        elif kind is HELD or kind is LAUNCH:
            chunk = chunk or self._forward
            index = self._num_committed.get(chunk, 0)
        self._boundary = NotedBoundary(kind, chunk, index)

    def note_group(self, group: ObservedGroup) -> None:
        """Note the current state of a group: whether it is kept, and how many bytes it saved."""
        traits = NotedGroup(group.name, group.layer, group.is_kept, group.own_bytes)
        self._notes.groups[GroupKey(group.chunk, group.index)] = traits

    def note_move(self, op: Op, group: ObservedGroup, nbytes: int) -> None:
        """Note that a move of `nbytes` bytes has been performed."""
        self.note_group(group)
        key = GroupKey(group.chunk, group.index)
        self._notes.moves.append(NotedMove(self._clock(), self._boundary, op, key, nbytes))

    def note_moved(self) -> None:
        """Note that the moves of the boundary have been performed."""

    def note_group_stays(self, group: ObservedGroup, reason: Reason) -> None:
        """Note that a group was to be copied out, but stays."""
        self._notes.group_reasons[GroupKey(group.chunk, group.index)] = reason

    # -- times of the device -----------------------------------------------------------------------------------------

    def mark(self, stream: Stream) -> TimeMark:
        """Mark the time on `stream`, before and after a copy or wait that `note_copy` or `note_wait` records."""
        return self._device.mark_time(stream)

    def note_copy(self, op: Op, group: ObservedGroup, nbytes: int, begin: TimeMark, end: TimeMark) -> None:
        """Note that copies of a group were issued between two marks, the first after all that they wait for."""
        key = GroupKey(group.chunk, group.index)
        self._notes.copies.append(NotedCopy(op, key, nbytes, self._clock(), begin, end))
        self._storages.note_copy(op, group, begin)

    def note_wait(self, awaited: Awaited, group: ObservedGroup, begin: TimeMark, end: TimeMark) -> None:
        """Note that a compute stream was made to wait for a copy of a group between two marks on it."""
        key = GroupKey(group.chunk, group.index)
        self._notes.waits.append(NotedWait(awaited, key, begin, end))
        self._storages.note_wait(awaited, group, end)

    # -- saved tensors -----------------------------------------------------------------------------------------------

    def note_saved(
        self,
        tensor: torch.Tensor,
        group: ObservedGroup,
        *,
        storage: ObservedStorage | None = None,
        reason: Reason | None = None,
    ) -> None:
        """Note that autograd has saved a tensor.

        Args:
            tensor: as it was saved.
            group: the open group, or the one that stands for tensors outside the groups.
            storage: the storage that the store keeps for it; None: it stays, for `reason`.
            reason: why it stays.
        """
        number = -1 if storage is None else self._storages.number_of(storage, group)
        if not group.is_ungrouped and key_of(group) not in self._notes.groups:
            self.note_group(group)
        module = "" if self._modules is None else self._modules.running.innermost()
        nbytes = _storage_bytes(tensor) if storage is None else storage.nbytes
        save = NotedSave(group, module, tensor.shape, tensor.dtype, nbytes, number, reason)
        self._notes.saved.append(save)

    def note_storage_stays(self, storage: ObservedStorage, reason: Reason) -> None:
        """Note that a storage was to leave the device, but stays."""
        self._storages.note_stays(storage, reason)

    def note_residency(self, storage: ObservedStorage, to: enum.Enum | str) -> None:
        """Note that a storage has moved to another residency: a `Residency`, or its value."""
        self._storages.note_residency(storage, to if isinstance(to, str) else to.value)

    def note_counters(self, resident_bytes: int, inflight_bytes: int, host_bytes: int) -> None:
        """Note bytes on the device, in flight, and lent on the host, if they have changed."""
        counters = self._notes.counters
        if not counters or counters[-1][1:] != (resident_bytes, inflight_bytes, host_bytes):
            counters.append((self._clock(), resident_bytes, inflight_bytes, host_bytes))

    # -- the end -----------------------------------------------------------------------------------------------------

    def finish(self, counts: Mapping[str, int] | None = None) -> PendingRecord:
        """End the recording, without waiting for the device.

        Args:
            counts: the counters of the iteration.
        """
        end = self._device.mark_time(self._device.current_stream())
        self.close()
        return PendingRecord(partial(self._make, end, dict(counts or {})))

    def _make(self, end: TimeMark, counts: dict[str, int], pace: Pace) -> StepRecord:
        origin = self._origin
        origin.device_ms(end)  # blocks until the device has finished the step
        if self._compares_clocks:
            origin = origin.after(lag_ms(origin, self._stream, self._clock))
        return assemble(self._notes, origin, end, self._about, counts, pace)

    def waits(self) -> tuple[WaitRecord, ...]:
        """Return the waits of compute for copies so far; blocks until the device has come to them."""
        return waits_of(self._notes.waits, self._origin)

    def close(self) -> None:
        """Stop recording, at the end of the step or after an exception in it. Idempotent."""
        if self._modules is not None:
            self._modules.remove()
            self._modules = None  # refers to the model, which may be freed before the record is made
        self._storages.clear()


def _storage_bytes(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # sparse, and wrappers without a storage of their own
        return tensor.numel() * tensor.element_size()
