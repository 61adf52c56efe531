"""How many saved bytes there are, and how many of them are on the device."""

from __future__ import annotations

from collections.abc import Sequence

from offload_engine._saved.storage import SavedStorage
from offload_engine.meter import ResidencyMeter
from offload_engine.stats import IterationStats


class Accounts:
    """What bounds are held against, what the statistics of an iteration tell, and what a meter shows.

    Args:
        meter: is told of every buffer, whoever saved it.
        resident_limit_bytes: see below.

    Attributes:
        is_metered: there is a meter; else `hold` need not be called.
        stats: of the running iteration, or of the last one.
        saved_bytes: of the storages with a handle left, wherever they are, but for what no group saved.
        resident_bytes: those of them that are on the device, or have a buffer there for a copy-in.
        resident_limit_bytes: how many of those there may be; None: nobody asked.
        prefetched_bytes: bytes of copy-in that are issued and not used yet.
    """

    def __init__(self, meter: ResidencyMeter | None, resident_limit_bytes: int | None) -> None:
        self.stats: IterationStats = IterationStats()
        self.saved_bytes: int = 0
        self.resident_bytes: int = 0
        self.resident_limit_bytes: int | None = resident_limit_bytes
        self.prefetched_bytes: int = 0
        self.is_metered: bool = meter is not None
        self._meter = meter

    def begin(self) -> None:
        """Start counting anew."""
        self.stats = IterationStats(peak_resident_bytes=self.resident_bytes)

    def has_resident_room(self, nbytes: int) -> bool:
        """True if `nbytes` more would not exceed the limit of resident bytes."""
        return self.resident_limit_bytes is None or self.resident_bytes + nbytes <= self.resident_limit_bytes

    def note_managed(self, nbytes: int) -> None:
        """A group has saved a storage, resident: from now on it counts."""
        # Once for each storage, so without a call of `note_arrival`.
        stats = self.stats
        stats.managed_bytes += nbytes
        self.saved_bytes += nbytes
        self.resident_bytes += nbytes
        if self.resident_bytes > stats.peak_resident_bytes:
            stats.peak_resident_bytes = self.resident_bytes

    def note_arrival(self, nbytes: int) -> None:
        """`nbytes` of what groups saved have a buffer on the device from now on."""
        self.resident_bytes += nbytes
        if self.resident_bytes > self.stats.peak_resident_bytes:
            self.stats.peak_resident_bytes = self.resident_bytes

    def note_copied_in(self, nbytes: int) -> None:
        """The copy-in of `nbytes` has been issued."""
        self.stats.copied_in_bytes += nbytes
        self.prefetched_bytes += nbytes
        self.note_arrival(nbytes)

    def hold(self, storages: Sequence[SavedStorage]) -> None:
        """Tell the meter that these have buffers now."""
        if self._meter is not None:
            for saved in storages:
                assert saved.buffer is not None
                self._meter.hold(saved.buffer.untyped_storage()._cdata, saved.nbytes)

    def drop(self, saved: SavedStorage) -> None:
        """The buffer of a storage is about to go."""
        if not saved.group.is_rest:
            self.resident_bytes -= saved.nbytes
        if self._meter is not None and saved.buffer is not None:
            self._meter.drop(saved.buffer.untyped_storage()._cdata)
