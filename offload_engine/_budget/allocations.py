# SPDX-License-Identifier: Apache-2.0
"""`AllocationNotes`: notes when an engine moves what, while the allocator's work is recorded."""

from __future__ import annotations

import enum
from typing import Any

import torch

from offload_engine._devices.base import MemoryGauge
from offload_engine._observe.notes import ObservedGroup, ObservedStorage
from offload_engine._saved.storage import COPYING_IN, RETIRED
from offload_engine.planning.allocations import NotedMoves, NotedRun, NotedStorage, RecordedStep, recorded_step
from offload_engine.planning.moves import Boundary, GroupKey


class AllocationNotes:
    """Records the allocations of one step, up to the begin of the next. Not every device can: then it notes nothing.

    What it notes of a storage gets the time of the next boundary, at which the storage is still there, or of the last
    one, if it retires: to ask for the time costs the host 20 microseconds, and a group has many storages.

    Args:
        gauge: of the device.
    """

    def __init__(self, gauge: MemoryGauge) -> None:
        self._gauge = gauge
        self._is_on = gauge.record()
        self._origin = gauge.count()
        self._boundaries: list[NotedMoves] = []
        self._storages: list[tuple[NotedStorage, list[ObservedGroup]]] = []
        self._alive: dict[ObservedStorage, int] = {}  # index in `_storages`
        self._saved: list[tuple[NotedStorage, int]] = []  # with their addresses, since the last boundary
        self._returned: list[tuple[NotedStorage, int]] = []
        self._runs: list[NotedRun] = []
        self._last = 0  # time

    def note_boundary(self, boundary: Boundary) -> None:
        """Note that the engine has come to a boundary."""
        if self._is_on:
            now = self._pass_time()
            self._boundaries.append(NotedMoves(boundary, now, now))

    def note_moved(self) -> None:
        """Note that it has performed the moves of the boundary."""
        if self._boundaries:
            self._boundaries[-1] = self._boundaries[-1]._replace(ends=self._pass_time())

    def note_saved(self, tensor: torch.Tensor, group: ObservedGroup, storage: ObservedStorage) -> None:
        """Note that a group has saved a tensor of a storage."""
        if not self._is_on or group.is_ungrouped:
            return
        index = self._alive.get(storage)
        if index is None:
            index = self._alive[storage] = len(self._storages)
            self._storages.append((NotedStorage([]), []))
            self._saved.append((self._storages[index][0], address_of(tensor)))
        self._storages[index][1].append(group)

    def note_residency(self, storage: Any, to: enum.Enum | str) -> None:
        """Note that a storage has moved to another residency."""
        index = self._alive.get(storage)
        if index is None:
            return
        if to is COPYING_IN and storage.buffer is not None:
            self._returned.append((self._storages[index][0], address_of(storage.buffer)))
        elif to is RETIRED:
            self._storages[index][0].retired = self._last
            del self._alive[storage]

    def begin_run(self, name: str, start: torch.Tensor | None) -> NotedRun | None:
        """Note the begin of a module that `name` could recompute, starting from a tensor; None: nothing is noted."""
        if not self._is_on:
            return None
        self._runs.append(NotedRun(name, self.now(), 0 if start is None else address_of(start)))
        return self._runs[-1]

    def now(self) -> int:
        """Return the time."""
        return self._gauge.count() - self._origin

    def finish(self) -> RecordedStep | None:
        """Stop recording; return the allocations of the step. None: not known. Call it once."""
        if not self._is_on:
            return None
        self._is_on = False
        self._pass_time()
        log = self._gauge.recorded()
        self._alive.clear()
        if log is None:
            return None
        for storage, groups in self._storages:
            storage.savers += [GroupKey(group.chunk, group.index) for group in dict.fromkeys(groups)]
        return recorded_step(log, self._boundaries, (storage for storage, _ in self._storages), self._runs)

    def _pass_time(self) -> int:
        """Return the time, and note it for what came since it was asked last."""
        now = self._last = self.now()
        for storage, address in self._saved:
            storage.saved = address, now
        for storage, address in self._returned:
            storage.returned = address, now
        self._saved.clear()
        self._returned.clear()
        return now


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of the storage of a tensor."""
    return tensor.untyped_storage().data_ptr()
