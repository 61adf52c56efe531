# SPDX-License-Identifier: Apache-2.0
"""`ResidentGauge`: measures resident bytes where the device cannot measure memory, as on the CPU device."""

from __future__ import annotations

from collections.abc import Callable

from offload_engine._saved.counters import ByteCounters
from offload_engine.planning.allocations import AllocationLog


class ResidentGauge:
    """Reports the bytes of saved tensors in groups as all that the process holds; implements `MemoryGauge`.

    Args:
        counters: the engine's; their peak is reset.
    """

    def __init__(self, counters: ByteCounters) -> None:
        self._counters = counters
        self._most_bytes = 0  # before the last `reset` of this iteration
        self._stats = counters.stats

    def peak_bytes(self) -> int:
        """See `MemoryGauge`."""
        return self._counters.stats.peak_resident_bytes

    def reset(self) -> None:
        """See `MemoryGauge`."""
        stats = self._counters.stats
        self._most_bytes = max(stats.peak_resident_bytes, self._most_bytes if stats is self._stats else 0)
        self._stats = stats
        stats.peak_resident_bytes = self._counters.resident_bytes

    def restore(self) -> None:
        """Set the peak of the counters to that of the iteration, whatever was reset in it."""
        if self._counters.stats is self._stats:
            self._stats.peak_resident_bytes = max(self._stats.peak_resident_bytes, self._most_bytes)

    def held_bytes(self) -> int:
        """See `MemoryGauge`."""
        return self.peak_bytes()

    def outside_bytes(self) -> int:
        """See `MemoryGauge`."""
        return 0

    def taken_bytes(self) -> int:
        """See `MemoryGauge`."""
        return self._counters.resident_bytes

    def total_bytes(self) -> int:
        """See `MemoryGauge`."""
        return 0

    def trim(self) -> None:
        """See `MemoryGauge`."""

    def reserve(self, nbytes: int) -> None:
        """See `MemoryGauge`."""

    def watch(self, on_shortage: Callable[[], None]) -> None:
        """See `MemoryGauge`."""

    def record(self) -> bool:
        """See `MemoryGauge`."""
        return False

    def count(self) -> int:
        """See `MemoryGauge`."""
        return 0

    def recorded(self) -> AllocationLog | None:
        """See `MemoryGauge`."""
        return None
