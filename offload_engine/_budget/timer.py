"""`StepTimer`: how long a step takes on the device."""

from __future__ import annotations

from offload_engine._devices.base import Device, TimeMark


class StepTimer:
    """Times the steps that it is told to; the host waits only when it asks for the time.

    Args:
        device: marks time.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._begin: TimeMark = None
        self._end: TimeMark = None
        self._is_on = False

    def begin(self, is_on: bool) -> None:
        """Begin a step, which is timed if `is_on`."""
        self._is_on = is_on
        self._begin = self._mark()

    def end(self) -> None:
        """End the step."""
        self._end = self._mark()

    @property
    def milliseconds(self) -> float:
        """Return how long the last step took, if it was timed; block until the device has come to its end."""
        return self._device.milliseconds_between(self._begin, self._end)

    def _mark(self) -> TimeMark:
        return self._device.mark_time(self._device.current_stream()) if self._is_on else None
