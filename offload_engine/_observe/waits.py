# SPDX-License-Identifier: Apache-2.0
"""`WaitTimer`: times one step and its waits for copies, and records nothing else."""

from __future__ import annotations

from typing import Any, Final

from offload_engine._devices.base import Device, TimeMark
from offload_engine._observe.notes import ObservedGroup
from offload_engine._observe.record import Awaited, StepRecord
from offload_engine._observe.recorder import Recorder
from offload_engine.stats import StepTimes

_SHORTEST_WAIT_MS: Final = 0.005  # two time marks with nothing between them are 1.5 microseconds apart on an H100


class WaitTimer(Recorder):
    """Times a step that is logged: four time marks for each group that moves, and nothing else.

    Args:
        device: marks time.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._waits: list[tuple[TimeMark, TimeMark]] = []

    def note_wait(self, awaited: Awaited, group: ObservedGroup, begin: TimeMark, end: TimeMark) -> None:
        """See `Recorder`."""
        self._waits.append((begin, end))

    def end(self) -> PendingTimes:
        """End the step, without waiting for the device."""
        end = self._device.mark_time(self._device.current_stream())
        self.close()
        return PendingTimes(self._device, (self._origin.mark, end), self._waits)

    def _note_nothing(self, *args: Any, **kwargs: Any) -> None:
        """Note nothing: no table will be made of this step."""

    note_boundary = note_group = note_move = note_group_stays = note_copy = _note_nothing
    note_saved = note_storage_stays = note_residency = note_counters = _note_nothing


class PendingTimes:
    """The times of a step that has ended on the host.

    Args:
        device: measures between marks.
        step: its first and last mark.
        waits: begin and end of each.
    """

    def __init__(self, device: Device, step: tuple[TimeMark, TimeMark], waits: list[tuple[TimeMark, TimeMark]]) -> None:
        self._device = device
        self._step = step
        self._waits = waits
        self._times: StepTimes | None = None

    def get(self) -> StepTimes:
        """Return the times; blocks until the device has reached the end of the step."""
        if self._times is None:
            step_ms = self._device.milliseconds_between(*self._step)
            waits = [self._device.milliseconds_between(*wait) for wait in self._waits]
            self._times = StepTimes(step_ms, sum(wait for wait in waits if wait > _SHORTEST_WAIT_MS))
            self._waits = []  # frees the time marks

        return self._times


def times_of(record: StepRecord) -> StepTimes:
    """Return the times of a recorded step."""
    return StepTimes(record.duration_ms, sum(wait.exposed_ms for wait in record.waits))
