"""`LastStep`: what a step took, in memory and time, and what it saved."""

from __future__ import annotations

from offload_engine._budget.gauge import ResidentGauge
from offload_engine._devices.base import Device, MemoryGauge, TimeMark
from offload_engine.stats import IterationStats


class LastStep:
    """Measures the running step; has the figures of the last one that ended.

    Args:
        device: marks time.
        gauge: measures what the process holds.

    Attributes:
        has_ended: it was not abandoned.
        peak_bytes: of what torch's allocator had lent, since the gauge was reset.
        chunk_bytes: saved by a chunk, on average.
    """

    def __init__(self, device: Device, gauge: MemoryGauge) -> None:
        self.has_ended: bool = False
        self.peak_bytes: int = 0
        self.chunk_bytes: float = 0.0
        self._held_bytes = 0
        self._device = device
        self._gauge = gauge
        self._begin: TimeMark = None
        self._end: TimeMark = None
        self._is_timed = False

    def begin(self, is_timed: bool) -> None:
        """Begin a step."""
        self.has_ended, self._is_timed = False, is_timed
        self._begin = self._mark()

    def end(self, stats: IterationStats, num_chunks: int) -> None:
        """End it."""
        if isinstance(self._gauge, ResidentGauge):
            self._gauge.restore()
        self.peak_bytes, self._held_bytes = self._gauge.peak_bytes(), self._gauge.held_bytes()
        self.chunk_bytes = stats.managed_bytes / num_chunks if num_chunks else 0.0
        self._end = self._mark()
        self.has_ended = True

    @property
    def held_bytes(self) -> int:
        """Return what the process held in the step and behind it, where another engine may have reset the peak."""
        return max(self._held_bytes, self._gauge.held_bytes())

    @property
    def milliseconds(self) -> float:
        """Return how long it took, if it was timed; block until the device has come to its end."""
        return self._device.milliseconds_between(self._begin, self._end)

    def _mark(self) -> TimeMark:
        return self._device.mark_time(self._device.current_stream()) if self._is_timed else None
