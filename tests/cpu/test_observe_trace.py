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
from offload_engine._observe.record import CopyRecord
from offload_engine.planning.moves import OUT
from tests.cpu.test_observe_report import MIB, a_step

_PHASES = {
    "X": {"ts", "dur", "tid", "name"},
    "C": {"ts", "name", "args"},
    "i": {"ts", "tid", "name", "s"},
    "M": {"name", "args"},
}


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
    record = replace(a_step(), begin_unix_ns=begin, copies=(CopyRecord(OUT, "1.0:0", MIB, 0.0, 0.0, 5.0),))
    ours = write_trace(record, tmp_path / "ours.json.gz")
    merged = merge([ours, theirs], tmp_path / "merged.json")
    data = json.loads(merged.read_text())
    (span,) = [event for event in data["traceEvents"] if event["name"] == "at that moment"]
    (copy,) = [
        event for event in data["traceEvents"] if event["name"] == "attn 1.0:0" and event.get("cat") == "offload"
    ]
    assert abs(span["ts"] - copy["ts"]) < 2000, "microseconds"
    assert "schemaVersion" in data, "what torch has written stays"
    assert read_records(merged) == [record]
    other = tmp_path / "other.json"
    other.write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match="baseTimeNanoseconds"):
        merge([ours, other], tmp_path / "merged.json")
