# SPDX-License-Identifier: Apache-2.0
"""Recorded steps for readers: tables, the command, Chrome traces, and the tables of all ranks."""

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
from offload_engine._observe.report import moves_text, report_table, summary_of_stats, why_text
from offload_engine.planning.moves import DROP, IN, OUT
from offload_engine.rank_reports import RankReports
from offload_engine.report import main
from offload_engine.stats import IterationStats

MIB = 1 << 20
NUM_LAYERS = 4


def saved(group: str, storage: int, reason: Reason, nbytes: int = MIB, module: str = "") -> SavedRecord:
    return SavedRecord(group, "attn" if ":" in group else "", module, (512, 512), "float32", nbytes, storage, reason)


def a_step(rank: int = 0) -> StepRecord:
    """A chunk of four layers: two tensors over one storage in each, the last layer kept; outside: small and unasked."""
    reasons = [Reason.MOVED] * (NUM_LAYERS - 1) + [Reason.KEPT]
    groups = [GroupRecord(f"1.0:{i}", "attn", i, i == NUM_LAYERS - 1, MIB) for i in range(NUM_LAYERS)]
    inside = [saved(f"1.0:{i}", i, reason) for i, reason in enumerate(reasons) for _ in range(2)]
    norms = [f"module.decoder.layers.{i}.norm" for i in range(NUM_LAYERS)]
    outside = [saved("1.0", -1, Reason.TOO_SMALL, 1024, module=norm) for norm in norms]
    copies = (OUT, 0, 4_000_000, 1.0, 2.0), (OUT, 1, 8_000_000, 2.0, 3.0), (IN, 0, 4_000_000, 5.0, 7.0)
    waits = (0, 6.0, 7.0), (2, 8.0, 8.5), (1, 9.0, 9.002)
    stages = (0, "packed", 0.5, 1.0), (0, "copying out", 1.0, 2.1), (1, "packed", 1.5, 9.0), (2, "packed", 9.0, 9.5)
    return StepRecord(
        rank=rank,
        step=3,
        begin_unix_ns=0,
        duration_ms=10.0,
        counts={"prefetch_misses": 5},
        groups=tuple(groups),
        moves=(MoveRecord(1.0, "F1.0:0", OUT, "1.0:0", MIB), MoveRecord(2.5, "F1.0:1", DROP, "1.0:0", MIB)),
        copies=tuple(CopyRecord(op, f"1.0:{i}", nbytes, 0.0, *times) for op, i, nbytes, *times in copies),
        waits=tuple(WaitRecord(Awaited.COPY_IN, f"1.0:{i}", *times) for i, *times in waits),
        stages=tuple(StageRecord(f"1.0:{i}", name, *times) for i, name, *times in stages),
        counters=(CounterRecord(1.0, MIB, 0, 0), CounterRecord(2.5, 2 * MIB, MIB, MIB)),
        saved=(*inside, *outside, saved("1.0", 9, Reason.NOT_ASKED, module="module.decoder.layers.0.mlp.fc2")),
    )


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_the_report_has_both_tables_and_shows_the_worst_of_ranks_with_the_same_stages() -> None:
    slow = replace(a_step(3), duration_ms=20.0, copies=(CopyRecord(OUT, "1.0:0", 4_000_000, 0.0, 1.0, 11.0),))
    lines = report_table([a_step(0), slow]).splitlines()
    (row,) = [line for line in lines if "│ attn" in line and "0-2" in line]
    assert cells_of(row) == ["0, 3", "1", "0-2", "attn", "6", "6.0", "0.0", "0.0", "", "3.0"]
    (total,) = [line for line in lines if "│ all" in line]
    assert cells_of(total)[4:] == ["8", "6.0", "2.0", "0.0", "not asked for 2.0", "3.0"]
    link = ["0, 3", "1", "20.0", "11.4", "0.4", "50%", "3.8", "2.0", "20%", "1.5", "15%", "5"]
    assert cells_of(lines[-2]) == link


def test_one_group_is_no_groups() -> None:
    stats = IterationStats(num_groups=1, num_kept_groups=1, kept_bytes=MIB, managed_bytes=MIB, num_host_limit_groups=2)
    lines = summary_of_stats(stats).splitlines()
    assert lines[0].startswith("0 of 1 group offloaded: moved nothing of the 1 MiB saved in 1 group; ")
    assert lines[1:3] == [
        "1 group kept, 1 MiB: the backward comes at once",
        "2 groups stayed, the host tier had no room: raise host_limit_bytes",
    ]


# ---- the command ----


def test_the_command_gathers_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(write_trace(a_step(rank), tmp_path / f"rank{rank}.json.gz")) for rank in range(2)]
    for arguments, expected in (
        (files, report_table([a_step(0), a_step(1)])),
        ([*files, "--rank", "1"], report_table([a_step(1)])),
        ([files[0], "--why", "norm"], why_text([a_step(0)], "norm")),
        ([files[0], "--moves", "--group", "1.0:0"], moves_text([a_step(0)], "1.0:0")),
    ):
        assert main(arguments) == 0
        assert capsys.readouterr().out == expected
    both = tmp_path / "both.json"
    assert main([*files, "--merge", str(both)]) == 0 and len(read_records(both)) == 2
    capsys.readouterr()
    for wrong, message in (
        (["--rank", "7"], "no step of rank 7: the files have ranks 0, 1"),
        (["--why", "("], "--why (: not a regular expression: missing ), unterminated"),
    ):
        assert main([*files, *wrong]) == 1
        assert message in capsys.readouterr().err


def test_a_file_that_is_no_recording_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content, message in (
        ("cut.json", b'{"traceEvents": [', "is not a trace: not complete, or not JSON"),
        ("list.json", b"[1, 2]", "expected a JSON object, got a list"),
        ("cut.json.gz", gzip.compress(b"{}" * 999, mtime=0)[:20], "is not a trace: not complete, or not JSON"),
        ("profile.json", b'{"traceEvents": []}', "has no recorded step: expected a file of engine.record(FILE)"),
        ("damaged.json", b'{"offloadEngineSteps": [{"version": 1}]}', "it is damaged"),
        ("other.json", b'{"offloadEngineSteps": [{"version": 0}]}', "a recorded step of version 0, expected 1"),
        ("missing.json", None, "No such file"),
    ):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        assert main([str(path)]) == 1
        error = capsys.readouterr().err
        assert str(path) in error and message in error and error.count("\n") == 1


# ---- traces ----

_PHASES = {"X": ("ts", "dur", "tid"), "C": ("ts", "args"), "i": ("ts", "tid", "s"), "M": ("args",)}


def check_schema(events: list[dict[str, Any]]) -> None:
    """Check the fields that Perfetto needs in the events of one process."""
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    rest = [event for event in events if event["ph"] != "M"]
    tracks = defaultdict(list)
    for event in events:
        assert {"name", *_PHASES[event["ph"]]} <= event.keys()
    for event in rest:
        assert event["ph"] == "C" or event["tid"] in named
        if event["ph"] == "X":
            tracks[event["tid"]].append(event)
    assert [event["ts"] for event in rest] == sorted(event["ts"] for event in rest)
    for slices in tracks.values():
        for one, other in zip(slices, slices[1:], strict=False):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-3, "slices of one track overlap"


def test_a_file_has_valid_events_and_the_records(tmp_path: Path) -> None:
    records = [a_step(0), a_step(1)]
    path = write_trace(records, tmp_path / "trace.json")
    assert read_records(path) == read_records(write_trace(records, tmp_path / "trace.json.gz")) == records
    events = json.loads(path.read_text())["traceEvents"]
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
    merged = merge([write_trace(record, tmp_path / "ours.json.gz"), theirs], tmp_path / "merged.json")
    events = json.loads(merged.read_text())["traceEvents"]
    (span,) = [event for event in events if event["name"] == "at that moment"]
    (copy,) = [event for event in events if event["name"] == "attn 1.0:0" and event.get("cat") == "offload"]
    assert abs(span["ts"] - copy["ts"]) < 2000, "microseconds"
    assert read_records(merged) == [record]
    (other := tmp_path / "other.json").write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match="baseTimeNanoseconds"):
        merge([merged, other], tmp_path / "both.json")


# ---- of all ranks, which tests/dist/test_second_step.py gathers ----


def test_without_a_process_group_there_is_one_rank() -> None:
    for record, table in ((a_step(), report_table([a_step()])), (None, "")):
        reports = RankReports("x")
        reports.announce()
        assert reports.share(record) and reports.table() == table
