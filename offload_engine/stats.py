"""Counters of one iteration. Reporting code reads them; nothing is decided by them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class IterationStats:
    """What the engine did between `begin_iteration()` and `end_iteration()`."""

    copied_out_bytes: int = 0
    """Bytes of copy-out issued."""
    copied_in_bytes: int = 0
    """Bytes of copy-in issued."""
    prefetch_misses: int = 0
    """Storages still on the host when their group's backward began: their copy-in could not overlap anything."""
    num_groups: int = 0
    """Groups committed."""
    num_offloaded_groups: int = 0
    """Groups of which at least one storage was copied out."""
    num_kept_groups: int = 0
    """Groups that the plan keeps resident."""
    kept_bytes: int = 0
    """Bytes that the groups kept by the plan saved, over the whole iteration."""
    num_unplanned_groups: int = 0
    """Groups that differed from those of the plan: their chunks went on without it."""
    num_host_limit_groups: int = 0
    """Groups that stayed resident because the host tier had no room."""
    num_emptied_storages: int = 0
    """Storages that were emptied in place, because tensors outside autograd held them (`held_elsewhere()`)."""
    num_viewed_storages: int = 0
    """Storages that were to be emptied, but stayed resident: more tensors share them than were told, or they cannot be
    resized."""
    managed_bytes: int = 0
    """Bytes of all storages the engine took charge of, each counted once."""
    peak_resident_bytes: int = 0
    """The most managed bytes that were resident at once."""
    peak_host_bytes: int = 0
    """The most host bytes that were lent at once."""
    host_bytes: int = 0
    """Host-tier bytes that the pool had obtained from the system at the end."""
    num_storages_left: int = 0
    """Storages that a graph still held when the iteration ended (0 unless a graph is kept alive on purpose)."""
