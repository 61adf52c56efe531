"""Counters of one iteration, for reporting only: the engine makes no decision by them."""

from __future__ import annotations

from dataclasses import dataclass


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
    """Groups that the plan keeps resident."""
    kept_bytes: int = 0
    """Bytes that the groups kept by the plan saved, over the whole iteration."""
    num_unplanned_groups: int = 0
    """Groups that differed from those of the plan: their chunks went on without it."""
    num_outgrown_groups: int = 0
    """Groups that were chosen to be kept, but left: they, or all that was resident, had grown since."""
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
