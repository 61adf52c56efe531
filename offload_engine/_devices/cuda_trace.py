# SPDX-License-Identifier: Apache-2.0
"""Records what torch's allocator of GPU memory does, by its memory history."""

from __future__ import annotations

from typing import Any, Final

from offload_engine._compat import torch_private
from offload_engine.planning.allocations import ALLOCATED, FREE_ASKED, FREED, AllocationLog, Event
from offload_engine.planning.segments import Segment

_MOST_ENTRIES: Final = 200_000
"""A step with more is not recorded: to read as many takes half a second. (64 microbatches of 8 layers of
TransformerEngine: 140,000.)"""
_KINDS: Final = {"alloc": ALLOCATED, "free_requested": FREE_ASKED, "free_completed": FREED}
_UNKNOWN: Final = frozenset(("oom", "segment_map", "segment_unmap"))
"""Actions that the imitation of an allocator does not know."""
_NO_SPLIT_LIMIT: Final = -1


def start_recording() -> bool:
    """Start recording; return False if the user of this process records, which must go on, or this torch cannot."""
    try:
        if torch_private.cuda_records_memory():
            return False
    except ImportError:
        return False
    torch_private.cuda_record_memory("all", context=None, max_entries=_MOST_ENTRIES, clear_history=True)
    return True


def stop_recording(index: int) -> AllocationLog | None:
    """Stop recording; return what was recorded on the device of that index, None if not all was."""
    try:
        return log_of(torch_private.cuda_memory_snapshot(), index)
    finally:
        torch_private.cuda_record_memory(None)


def log_of(snapshot: dict[str, Any], index: int) -> AllocationLog | None:
    """Return the log of a device from a snapshot of torch's allocator; None if it is not complete.

    Args:
        snapshot: see `torch.cuda.memory._snapshot`.
        index: of the device.
    """
    traces = snapshot["device_traces"]
    trace = traces[index] if index < len(traces) else []
    if not trace or len(trace) >= _MOST_ENTRIES or any(entry["action"] in _UNKNOWN for entry in trace):
        return None
    if _divides_otherwise(snapshot.get("allocator_settings", {})):
        return None
    events = tuple(
        Event(_KINDS[entry["action"]], entry["addr"], entry["size"], entry["stream"])
        for entry in trace
        if entry["action"] in _KINDS
    )
    return AllocationLog(events, tuple(_segment(each) for each in snapshot["segments"] if _is_common(each, index)))


def _divides_otherwise(settings: dict[str, Any]) -> bool:
    """Return whether the user has set an allocator that the imitation does not know."""
    return bool(
        settings.get("max_split_size", _NO_SPLIT_LIMIT) != _NO_SPLIT_LIMIT
        or settings.get("garbage_collection_threshold")
        or settings.get("expandable_segments")
        or any(settings.get("roundup_power2_divisions", {}).values())
    )


def _is_common(segment: dict[str, Any], index: int) -> bool:
    """Return whether a segment is of the pools that all allocations share, unless they belong to a CUDA graph."""
    return bool(segment["device"] == index and tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0))


def _segment(found: dict[str, Any]) -> Segment:
    blocks = tuple((block["size"], block["state"] == "inactive") for block in found["blocks"])
    return Segment(found["address"], found["stream"], found["segment_type"] == "small", blocks)
