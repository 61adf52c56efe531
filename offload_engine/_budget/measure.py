# SPDX-License-Identifier: Apache-2.0
"""`MeasuringRecorder`: records a step, and measures memory and time at each of its boundaries."""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

import torch

from offload_engine._budget.allocations import AllocationNotes
from offload_engine._devices.base import Device, MemoryGauge, TimeMark
from offload_engine._observe.notes import ObservedGroup, ObservedStorage
from offload_engine._observe.reasons import Reason
from offload_engine._observe.recorder import Recorder
from offload_engine.planning.allocations import RecordedStep
from offload_engine.planning.memory import MeasuredBoundary
from offload_engine.planning.moves import (
    BACKWARD,
    BACKWARD_END,
    CHUNK_BACKWARD,
    FORWARD,
    LOSS_DONE,
    Boundary,
    BoundaryKind,
)
from offload_engine.schedule import Action, ChunkKey

_NS: Final = 1e6
"""Of a millisecond."""


class Interval(NamedTuple):
    """Work of compute between two boundaries, in ms of device time since the step began."""

    ends_at: Boundary
    begin_ms: float
    end_ms: float
    lag_ms: float = float("inf")
    """How far the device was behind the host at its end; infinite where it does not wait for it."""
    engine_ms: float = 0.0
    """Host time in it that the engine took to move and to measure."""


class _Mark(NamedTuple):
    """A boundary as the host came to it."""

    boundary: Boundary
    mark: TimeMark
    host_ns: int
    engine_ns: int
    """Host time of the engine since the mark before."""


class MeasuringRecorder(Recorder):
    """Measures one step. It takes about 70 microseconds at each boundary on a GPU.

    Args:
        device: marks time.
        gauge: measures memory.

    Attributes:
        allocation_notes: of the step.
    """

    def __init__(self, device: Device, gauge: MemoryGauge) -> None:
        super().__init__(device)
        self._gauge = gauge
        self._marks: list[_Mark] = []
        self._is_queued = device.torch_device.type != "cpu"  # its work runs behind the host
        self._engine_ns = 0
        self._entered_ns: int | None = None  # when the engine came to the running boundary
        self._measured: list[MeasuredBoundary] = []
        self._backward: dict[ChunkKey | None, int] = {}  # the group that the backward of each chunk has reached
        self._peak_bytes = 0
        self.allocation_notes: AllocationNotes = AllocationNotes(gauge)
        gauge.reset()

    def note_boundary(self, kind: BoundaryKind, chunk: ChunkKey | None, group: ObservedGroup | None = None) -> None:
        """See `Recorder`; measures the interval before."""
        super().note_boundary(kind, chunk, group)
        assert self._boundary is not None
        index = self._boundary.number
        if kind is BACKWARD:
            self._backward[chunk] = index
        elif kind is BACKWARD_END:  # the engine does not say of which group
            index = self._backward.get(chunk, index)
        boundary = Boundary(kind, self._boundary.chunk, index)
        mark, self._entered_ns = self._device.mark_time(self._device.current_stream()), self._clock()
        self._marks.append(_Mark(boundary, mark, self._entered_ns, self._engine_ns))
        self._engine_ns = 0
        self.allocation_notes.note_boundary(boundary)
        self._peak_bytes = self._gauge.peak_bytes()

    def note_counters(self, resident_bytes: int, inflight_bytes: int, host_bytes: int) -> None:
        """See `Recorder`; called after `note_boundary`, before the moves."""
        super().note_counters(resident_bytes, inflight_bytes, host_bytes)
        self._measured.append(MeasuredBoundary(self._marks[-1].boundary, self._peak_bytes, resident_bytes))

    def note_moved(self) -> None:
        """See `Recorder`; from here on, compute reaches another peak."""
        self.allocation_notes.note_moved()
        self._gauge.reset()
        if self._entered_ns is not None:
            self._engine_ns += self._clock() - self._entered_ns
            self._entered_ns = None

    def note_saved(
        self,
        tensor: torch.Tensor,
        group: ObservedGroup,
        *,
        storage: ObservedStorage | None = None,
        reason: Reason | None = None,
    ) -> None:
        """See `Recorder`."""
        began_ns = self._clock()
        super().note_saved(tensor, group, storage=storage, reason=reason)
        if storage is not None:
            self.allocation_notes.note_saved(tensor, group, storage)
        self._engine_ns += self._clock() - began_ns

    def note_residency(self, storage: ObservedStorage, to: enum.Enum | str) -> None:
        """See `Recorder`."""
        super().note_residency(storage, to)
        self.allocation_notes.note_residency(storage, to)

    def allocations(self) -> RecordedStep | None:
        """Stop recording allocations; return those of the step, and of what came after it. None: not known."""
        return self.allocation_notes.finish()

    @property
    def boundaries(self) -> tuple[MeasuredBoundary, ...]:
        """Return what was measured, in order."""
        return tuple(self._measured)

    def actions(self) -> list[Action]:
        """Return the forwards and backwards that have run, in order."""
        found: dict[Action, None] = {}
        for (kind, chunk, _), *_ in self._marks:
            if chunk is not None and kind is FORWARD:
                found[Action("F", chunk)] = None
            elif chunk is not None and kind in (CHUNK_BACKWARD, LOSS_DONE, BACKWARD):
                found[Action("B", chunk)] = None
        return list(found)

    def intervals(self) -> list[Interval]:
        """Return the times between boundaries; blocks until the device has passed the last one."""
        found, begin = [], 0.0
        for boundary, mark, host_ns, engine_ns in self._marks:
            end = self._origin.device_ms(mark)
            lag = end - self._origin.host_ms(host_ns) if self._is_queued else float("inf")
            found.append(Interval(boundary, begin, end, lag, engine_ns / _NS))
            begin = end
        return found
