# SPDX-License-Identifier: Apache-2.0
"""`ResidencyMeter`: counts bytes of saved activations on the device: current, peak, and over time."""

from __future__ import annotations

import time


class ResidencyMeter:
    """Counts resident saved bytes, each storage once, however many holders it has.

    The engine and `SavedTensorTracker` report to the same meter, so steps with and without offload are measured alike.

    Attributes:
        current_bytes: bytes resident now.
        peak_bytes: maximum since construction or `reset_peak()`.
        timeline: (`time.perf_counter()` seconds, bytes) at each change, if `record_timeline` is set.
    """

    def __init__(self, record_timeline: bool = False) -> None:
        self.current_bytes: int = 0
        self.peak_bytes: int = 0
        self.record_timeline: bool = record_timeline
        self.timeline: list[tuple[float, int]] = []
        self._holders: dict[int, list[int]] = {}  # storage address -> [number of holders, bytes]

    def hold(self, storage: int, nbytes: int) -> None:
        """Count one more holder of the storage at address `storage`."""
        entry = self._holders.get(storage)
        if entry is not None:
            entry[0] += 1
            return
        self._holders[storage] = [1, nbytes]
        self._change(nbytes)

    def drop(self, storage: int) -> None:
        """Undo one `hold`.

        Raises:
            KeyError: if `storage` has no holder.
        """
        entry = self._holders[storage]
        entry[0] -= 1
        if entry[0] == 0:
            del self._holders[storage]
            self._change(-entry[1])

    def reset_peak(self) -> None:
        """Start a new peak, and a new timeline, at the current bytes."""
        self.peak_bytes = self.current_bytes
        self.timeline = []

    def _change(self, delta: int) -> None:
        self.current_bytes += delta
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        if self.record_timeline:
            self.timeline.append((time.perf_counter(), self.current_bytes))
