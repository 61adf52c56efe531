# SPDX-License-Identifier: Apache-2.0
"""`LastStep`: measures what the last step of an engine took."""

from __future__ import annotations

from offload_engine._budget.gauge import ResidentGauge
from offload_engine._devices.base import Device, MemoryGauge, TimeMark
from offload_engine.stats import IterationStats


class LastStep:
    """Keeps what a step took, until the next one ends.

    Args:
        device: marks time.
        gauge: measures memory.

    Attributes:
        device: marks time.
        gauge: measures memory.
        has_ended: False if it was abandoned.
        peak_bytes: peak of allocated bytes in it, or since an earlier reset of the gauge.
        end_bytes: the most bytes that the process held by its end, or since an earlier reset of the gauge.
        num_chunks: number of chunks that saved in it.
        chunk_bytes: bytes saved by each of its chunks, on average.
        milliseconds: its time up to the next one, if it was timed; see `measure`.
    """

    def __init__(self, device: Device, gauge: MemoryGauge) -> None:
        self.gauge: MemoryGauge = gauge
        self.has_ended: bool = False
        self.peak_bytes: int = 0
        self.end_bytes: int = 0
        self.num_chunks: int = 0
        self.chunk_bytes: float = 0.0
        self.milliseconds: float = 0.0
        self.device: Device = device
        self._is_timed = False
        self._begin_mark: TimeMark = None
        self._end_mark: TimeMark = None
        self._between_ms = float("inf")  # at the least, of all steps so far

    def begin(self, is_timed: bool) -> None:
        """Note that a step begins."""
        self.has_ended, self._is_timed = False, is_timed
        self._begin_mark = self._mark()

    def end(self, stats: IterationStats, num_chunks: int) -> None:
        """Note what an iteration took.

        Args:
            stats: of the iteration.
            num_chunks: number of chunks that saved; 0 without a backward. If groups saved even so, it was an evaluation
                that keeps gradients, and does not count as a step.
        """
        if isinstance(self.gauge, ResidentGauge):
            self.gauge.restore()
        self.peak_bytes, self.end_bytes = self.gauge.peak_bytes(), self.gauge.held_bytes()
        self.num_chunks = num_chunks
        self.chunk_bytes = stats.managed_bytes / num_chunks if num_chunks else 0.0
        self._end_mark = self._mark()
        self.has_ended = bool(num_chunks) or not stats.managed_bytes

    def measure(self) -> None:
        """Measure the time of a finished step, if it is timed, when the next one begins. Waits for the device.

        Of the times between two steps, as for an optimizer, the least one counts: an evaluation between two steps
        belongs to neither.
        """
        if self._is_timed and self.has_ended:
            between = self.device.milliseconds_between(self._end_mark, self._mark())
            self._between_ms = min(self._between_ms, between)
            within = self.device.milliseconds_between(self._begin_mark, self._end_mark)
            self.milliseconds = within + self._between_ms

    def held_bytes(self) -> int:
        """Return the most bytes that the process held in the step or after it; another engine may reset the peak."""
        return max(self.end_bytes, self.gauge.held_bytes())

    def _mark(self) -> TimeMark:
        return self.device.mark_time(self.device.current_stream()) if self._is_timed else None
