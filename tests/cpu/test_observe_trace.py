# SPDX-License-Identifier: Apache-2.0
"""Chrome traces of recorded steps: valid events, one time base with torch.profiler, and the records inside."""

from __future__ import annotations

import gzip
import json
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_engine._observe.chrome_trace import merge, read_records, write_trace
from offload_engine._observe.reasons import Reason
from offload_engine._observe.record import (
    Awaited,
    CopyRecord,
    CounterRecord,
    GroupRecord,
    MoveRecord,
    SavedRecord,
    StageRecord,
    StepRecord,
    WaitRecord,
)
from offload_engine.planning.moves import IN, OUT

MIB = 1 << 20
_PHASES = {
    "X": {"ts", "dur", "tid", "name"},
    "C": {"ts", "name", "args"},
    "i": {"ts", "tid", "name", "s"},
    "M": {"name", "args"},
}


def a_step(rank: int = 0, **changes: Any) -> StepRecord:
    """Two groups that live at the same time, and one after them."""
    groups = tuple(GroupRecord(f"0.0:{i}", name, 0, False, 8 * MIB) for i, name in enumerate(("attn", "mlp", "act")))
    record = StepRecord(
        rank=rank,
        step=7,
        begin_unix_ns=1_790_000_000_123_456_789,
        duration_ms=20.0,
        counts={"prefetch_misses": 1},
        groups=groups,
        moves=(MoveRecord(2.0, "F0.0:0", OUT, "0.0:0", 8 * MIB), MoveRecord(8.0, "B0.0:1", IN, "0.0:0", 8 * MIB)),
        copies=(
            CopyRecord(OUT, "0.0:0", 8 * MIB, 2.0, 2.5, 3.5),
            CopyRecord(OUT, "0.0:1", 8 * MIB, 3.0, 3.5, 4.5),
            CopyRecord(IN, "0.0:0", 8 * MIB, 8.0, 9.0, 11.0),
        ),
        waits=(WaitRecord(Awaited.COPY_IN, "0.0:0", 10.0, 11.0),),
        stages=(
            StageRecord("0.0:0", "packed", 1.0, 2.5),
            StageRecord("0.0:0", "copying out", 2.5, 4.1),
            StageRecord("0.0:1", "packed", 2.0, 12.0),
            StageRecord("0.0:2", "packed", 12.0, 15.0),
        ),
        counters=(CounterRecord(1.0, 8 * MIB, 0, 0), CounterRecord(3.0, 16 * MIB, 8 * MIB, 8 * MIB)),
        saved=(SavedRecord("0.0:0", "attn", "layers.0", (2, 3), "float32", 24, 0, Reason.MOVED),),
    )
    return replace(record, **changes)


def check_schema(events: list[dict[str, Any]]) -> None:
    """Check the fields that Perfetto needs in the events of one process."""
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    rest = [event for event in events if event["ph"] != "M"]
    tracks = defaultdict(list)
    for event in events:
        assert _PHASES[event["ph"]] <= event.keys() and isinstance(event["pid"], int)
    for event in rest:
        assert event["ph"] == "C" or event["tid"] in named
        if event["ph"] == "X":
            tracks[event["tid"]].append(event)
    assert [event["ts"] for event in rest] == sorted(event["ts"] for event in rest)
    for slices in tracks.values():
        for one, other in zip(slices, slices[1:], strict=False):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-3, "slices of one track overlap"


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_file_has_valid_events_and_the_records(name: str, tmp_path: Path) -> None:
    records = [a_step(0), a_step(1)]
    path = write_trace(records, tmp_path / name)
    assert read_records(path) == records
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = json.loads(content)["traceEvents"]
    pids = {event["pid"] for event in events}
    assert len(pids) == 2
    for pid in pids:
        check_schema([event for event in events if event["pid"] == pid])


def test_it_merges_with_a_trace_of_torch_on_one_time_base(tmp_path: Path) -> None:
    """A range of the profiler and a copy of the record, at one moment, are at one moment of the merged trace."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.zeros(3)
        begin = time.time_ns()
        with torch.profiler.record_function("at that moment"):
            time.sleep(0.005)
    theirs = tmp_path / "profile.json.gz"
    profile.export_chrome_trace(str(theirs))
    record = a_step(begin_unix_ns=begin, copies=(CopyRecord(OUT, "0.0:0", MIB, 0.0, 0.0, 5.0),))
    ours = write_trace(record, tmp_path / "ours.json.gz")
    merged = merge([ours, theirs], tmp_path / "merged.json")
    data = json.loads(merged.read_text())
    (span,) = [event for event in data["traceEvents"] if event["name"] == "at that moment"]
    (copy,) = [
        event for event in data["traceEvents"] if event["name"] == "attn 0.0:0" and event.get("cat") == "offload"
    ]
    assert abs(span["ts"] - copy["ts"]) < 2000, "microseconds"
    assert "schemaVersion" in data, "what torch has written stays"
    assert read_records(merged) == [record]
    other = tmp_path / "other.json"
    other.write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match="baseTimeNanoseconds"):
        merge([ours, other], tmp_path / "merged.json")
