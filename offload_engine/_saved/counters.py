# SPDX-License-Identifier: Apache-2.0
"""`ByteCounters`: counts saved bytes, in total and on the device."""

from __future__ import annotations

from offload_engine._saved.storage import SavedStorage
from offload_engine.meter import ResidencyMeter
from offload_engine.stats import IterationStats


class ByteCounters:
    """Owns the byte counts that policies, statistics and a meter read.

    Args:
        meter: counts every buffer, saved by a group or not.

    Attributes:
        is_metered: whether there is a meter; without one `hold` need not be called.
        stats: counters of the running iteration, or of the last one.
        saved_bytes: bytes of storages that a group saved and a handle holds, wherever they are.
        resident_bytes: those of `saved_bytes` with a buffer on the device, also one for a copy-in.
        prefetched_bytes: bytes of copy-ins that are issued and not awaited yet.
    """

    def __init__(self, meter: ResidencyMeter | None) -> None:
        self.stats: IterationStats = IterationStats()
        self.saved_bytes: int = 0
        self.resident_bytes: int = 0
        self.prefetched_bytes: int = 0
        self.is_metered: bool = meter is not None
        self._meter = meter

    def begin(self) -> None:
        """Start the statistics of an iteration."""
        self.stats = IterationStats(peak_resident_bytes=self.resident_bytes)

    def clear(self) -> None:
        """Forget all storages, but not the statistics."""
        self.saved_bytes = self.resident_bytes = self.prefetched_bytes = 0

    def count_managed(self, nbytes: int) -> None:
        """Count a storage that a group has just saved."""
        # Runs once per storage, so `count_arrival` is inlined.
        stats = self.stats
        stats.managed_bytes += nbytes
        self.saved_bytes += nbytes
        self.resident_bytes += nbytes
        if self.resident_bytes > stats.peak_resident_bytes:
            stats.peak_resident_bytes = self.resident_bytes

    def count_arrival(self, nbytes: int) -> None:
        """Count `nbytes` that have a buffer on the device again."""
        self.resident_bytes += nbytes
        if self.resident_bytes > self.stats.peak_resident_bytes:
            self.stats.peak_resident_bytes = self.resident_bytes

    def count_copy_in(self, nbytes: int) -> None:
        """Count an issued copy-in."""
        self.stats.copied_in_bytes += nbytes
        self.prefetched_bytes += nbytes
        self.count_arrival(nbytes)

    def hold(self, storages: list[SavedStorage]) -> None:
        """Count the buffers of `storages` on the meter."""
        if self._meter is not None:
            for saved in storages:
                assert saved.buffer is not None
                key = saved.metered = saved.buffer.untyped_storage()._cdata
                self._meter.hold(key, saved.nbytes)

    def count_release(self, saved: SavedStorage) -> None:
        """Count the release of a storage's buffer; call it before the release."""
        if not saved.group.is_ungrouped:
            self.resident_bytes -= saved.nbytes
        if self._meter is not None and saved.buffer is not None:
            self._meter.drop(saved.metered)
