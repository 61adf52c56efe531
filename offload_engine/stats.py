# SPDX-License-Identifier: Apache-2.0
"""Counts what one iteration did, for reporting only: the engine decides nothing by these counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from offload_engine.counted import counted
from offload_engine.sizes import short_size

_GIB = 1 << 30


class StepTimes(NamedTuple):
    """How long a step took on its device, and how long compute waited for copies in it."""

    step_ms: float
    waited_ms: float

    @property
    def waited_percent(self) -> float:
        """Return the share of the step in which compute waited for copies."""
        return 100 * self.waited_ms / self.step_ms if self.step_ms > 0 else 0.0


@dataclass
class IterationStats:
    """Counts what the engine did between `begin_iteration()` and `end_iteration()`."""

    copied_out_bytes: int = 0
    """Bytes of copy-out issued."""
    copied_in_bytes: int = 0
    """Bytes of copy-in issued."""
    prefetch_misses: int = 0
    """Storages still on the host when their group's backward began: their copy-in could not overlap anything."""
    num_groups: int = 0
    """Groups committed."""
    num_offloaded_groups: int = 0
    """Groups with at least one storage copied out."""
    num_kept_groups: int = 0
    """Groups that stay resident because their backward comes at once."""
    kept_bytes: int = 0
    """Bytes saved by these groups, over the whole iteration."""
    num_unplanned_groups: int = 0
    """Groups that differed from the plan, so that their chunks continued without it."""
    num_outgrown_groups: int = 0
    """Groups that were chosen to be kept, but left, because they or the sum of resident bytes had grown since."""
    num_host_limit_groups: int = 0
    """Groups that stayed resident because the host tier had no room."""
    num_emptied_storages: int = 0
    """Storages that were emptied in place, because tensors outside autograd held them (`held_elsewhere()`)."""
    num_viewed_storages: int = 0
    """Storages that were to be emptied but stayed resident, because more tensors share them than were declared or they
    cannot be resized."""
    managed_bytes: int = 0
    """Bytes of all storages that groups saved, each counted once."""
    peak_resident_bytes: int = 0
    """The most managed bytes that were resident at once."""
    peak_host_bytes: int = 0
    """The most host bytes that were lent at once."""
    host_bytes: int = 0
    """Host-tier bytes that the pool held at the end."""
    num_storages_left: int = 0
    """Storages that a graph still held when the iteration ended (0 unless a graph is kept alive on purpose)."""

    def __str__(self) -> str:
        return self.line()

    def line(self, times: StepTimes | None = None) -> str:
        """Return what the step moved, held and waited for, as one line.

        Args:
            times: of this step or one like it; None: the line does not mention waits.
        """
        if not self.num_groups:
            return "no step yet"
        waits = [] if times is None else [_waits(times)]
        late = (
            [f"{counted(self.prefetch_misses, 'storage')} came back late (0 is best)"] if self.prefetch_misses else []
        )
        return "; ".join([self._moved(), self._held(), *waits, *late])

    def metrics(self, times: StepTimes | None = None) -> dict[str, float]:
        """Return the figures of a training log: sizes in GiB, waits in ms and in percent of the step."""
        found: dict[str, float] = {
            "moved_gib": self.copied_out_bytes / _GIB,
            "moved_percent": self._moved_percent(),
            "peak_resident_gib": self.peak_resident_bytes / _GIB,
            "peak_host_gib": self.peak_host_bytes / _GIB,
            "late": float(self.prefetch_misses),
        }
        if times is not None:
            found["waited_ms"] = times.waited_ms
            found["waited_percent"] = times.waited_percent
        return found

    def _moved_percent(self) -> float:
        return 100 * self.copied_out_bytes / self.managed_bytes if self.managed_bytes else 0.0

    def _moved(self) -> str:
        if not self.copied_out_bytes:
            return f"moved nothing of the {short_size(self.managed_bytes)} saved in {counted(self.num_groups, 'group')}"
        share = f"{self._moved_percent():.0f}% of the {short_size(self.managed_bytes)} saved"
        return f"moved {short_size(self.copied_out_bytes)}, {share}"

    def _held(self) -> str:
        peak = f"at most {short_size(self.peak_resident_bytes)} of it on the device at once"
        return f"{peak} and {short_size(self.peak_host_bytes)} on the host" if self.peak_host_bytes else peak


def _waits(times: StepTimes) -> str:
    return f"compute waited {times.waited_ms:,.1f} of {times.step_ms:,.0f} ms for copies ({times.waited_percent:.1f}%)"
