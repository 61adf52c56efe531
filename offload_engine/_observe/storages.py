# SPDX-License-Identifier: Apache-2.0
"""Follows each saved storage of a recorded step, and derives from it where its group is."""

from __future__ import annotations

from typing import Final

from offload_engine._devices.base import Device, Stream, TimeMark
from offload_engine._observe.notes import NotedStage, Notes, ObservedGroup, ObservedStorage, StorageFate
from offload_engine._observe.reasons import Reason
from offload_engine._observe.record import Awaited
from offload_engine.planning.moves import IN, OUT, Op

PACKED: Final = "packed"
"""On the device since its save."""
ON_HOST: Final = "on host"
USED: Final = "used"
"""On the device again."""
RETIRED: Final = "retired"
_STAGE_OF: Final = {OUT: "copying out", IN: "copying in", Awaited.COPY_OUT: ON_HOST, Awaited.COPY_IN: USED}
"""The stage that begins with a copy, or with the wait for it."""


class StorageLog:
    """Numbers storages, notes the fate of each, and marks the moments at which groups reach a place.

    Args:
        device: marks time.
        notes: receives the notes.
    """

    def __init__(self, device: Device, notes: Notes) -> None:
        self._device = device
        self._notes = notes
        self._numbers: dict[ObservedStorage, int] = {}  # of those that have not retired
        self._num_live: dict[ObservedGroup, int] = {}
        self._stages: dict[ObservedGroup, str] = {}  # the last one of each
        self._begun: dict[tuple[str, ObservedGroup], TimeMark] = {}  # known before the storages reach the stage

    def number_of(self, storage: ObservedStorage, saver: ObservedGroup) -> int:
        """Return the number of a storage that `saver` saves now; it belongs to the first group that saves it."""
        number = self._numbers.get(storage)
        if number is None:
            number = self._numbers[storage] = len(self._notes.fates)
            self._notes.fates.append(StorageFate())
        fate = self._notes.fates[number]
        if fate.group is None and not saver.is_ungrouped:
            fate.group = saver
            self._num_live[saver] = self._num_live.get(saver, 0) + 1
            if saver not in self._stages:
                self._note_stage(saver, PACKED, storage.stream)
        return number

    def note_stays(self, storage: ObservedStorage, reason: Reason) -> None:
        """See `Recorder.note_storage_stays`."""
        number = self._numbers.get(storage)
        if number is not None:
            self._notes.fates[number].reason = reason

    def note_copy(self, op: Op, group: ObservedGroup, begin: TimeMark) -> None:
        """Note that a copy has been issued, which moves its storages from `begin` on."""
        self._begun[_STAGE_OF[op], group] = begin

    def note_wait(self, awaited: Awaited, group: ObservedGroup, end: TimeMark) -> None:
        """Note that compute has waited for a copy: its storages have arrived at `end`."""
        self._begun[_STAGE_OF[awaited], group] = end

    def note_residency(self, storage: ObservedStorage, residency: str) -> None:
        """See `Recorder.note_residency`."""
        number = self._numbers.get(storage)
        if number is None:  # saved before the recording began
            return
        fate = self._notes.fates[number]
        if residency == "copying out":
            fate.reason = Reason.RECALLED  # unless it is released
        elif residency == ON_HOST:
            fate.reason = Reason.MOVED
        elif residency == RETIRED:
            self._numbers.pop(storage, None)
        if fate.group is not None:
            self._follow(fate.group, residency, storage.stream)

    def clear(self) -> None:
        """Forget the storages that are left."""
        self._numbers.clear()

    def _follow(self, group: ObservedGroup, residency: str, stream: Stream) -> None:
        """Note where a group is, once for all of its storages that move together."""
        if residency == RETIRED:
            self._begun.pop((ON_HOST, group), None)  # the wait was for a retirement
            self._num_live[group] -= 1
            if self._num_live[group] > 0:
                return
        elif residency == "resident":
            residency = USED
        if self._stages.get(group) != residency:
            self._note_stage(group, residency, stream)

    def _note_stage(self, group: ObservedGroup, stage: str, stream: Stream) -> None:
        self._stages[group] = stage
        begin = self._begun.pop((stage, group), None)
        if begin is None:
            begin = self._device.mark_time(stream)
        self._notes.stages.append(NotedStage(group, stage, begin))
