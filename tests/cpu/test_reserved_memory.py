# SPDX-License-Identifier: Apache-2.0
"""benchmarks/run.py reserved_memory, on histories of known content."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
pytest.importorskip("tqdm")

from benchmarks.reserved_memory import growths, main

MIB = 1 << 20
ENGINE = {"filename": "/lib/python3/site-packages/torch/nn/functional.py", "line": 3, "name": "linear"}
MODEL = {"filename": "/home/user/model.py", "line": 7, "name": "forward"}
CPP = {"filename": "??", "line": 0, "name": "at::empty"}


def event(action: str, begin: int, mib: float, *frames: dict[str, Any], stream: int = 0) -> dict[str, Any]:
    size = int(mib * MIB)
    return {"action": action, "addr": begin * MIB, "size": size, "stream": stream, "frames": list(frames)}


def segment(begin: int, *blocks: tuple[int, str], **more: Any) -> dict[str, Any]:
    found = [{"size": mib * MIB, "state": state} for mib, state in blocks]
    total = sum(block["size"] for block in found)
    return {"address": begin * MIB, "total_size": total, "blocks": found, "device": 0, "stream": 0, **more}


# A segment of 100 MiB that was there before, of which 30 are free; the second request finds no 40 in one piece.
FROM_SEGMENTS = [
    event("alloc", 0, 10, MODEL),
    event("segment_alloc", 100, 40),
    event("alloc", 100, 40, CPP, ENGINE, MODEL),
    event("free_requested", 0, 10),
    event("free_completed", 0, 10),
    event("segment_free", 900, 5),
]
SEGMENTS_AT_END = [
    segment(0, (10, "inactive"), (70, "active_allocated"), (20, "inactive")),
    segment(100, (40, "active_allocated")),
]


def test_a_growth_says_who_asked_and_what_was_free() -> None:
    history = growths.replay(SEGMENTS_AT_END, FROM_SEGMENTS)
    (growth,) = history.growths
    assert (growth.nbytes, growth.request_bytes, growth.asked_by) == (40 * MIB, 40 * MIB, "model.py:7 forward")
    assert (growth.reserved_bytes, growth.allocated_bytes) == (105 * MIB, 80 * MIB)
    assert growth.free_bytes == [20 * MIB, 5 * MIB]  # the 5 are given back at the end: they were there before
    assert (history.peak_reserved_bytes, history.peak_allocated_bytes) == (145 * MIB, 120 * MIB)


def test_only_mappings_of_an_expandable_segment_join_to_one_piece() -> None:
    after = [event("segment_alloc", 300, 50), event("alloc", 300, 50)]
    segments = [segment(begin, (10, "inactive")) for begin in (0, 10)]
    (growth,) = growths.replay([*segments, segment(300, (50, "active_allocated"))], after).growths
    assert growth.free_bytes == [10 * MIB, 10 * MIB]

    mapped = [event("segment_map", 20, 10), event("segment_map", 30, 20), event("alloc", 0, 50)]
    one = segment(0, (50, "active_allocated"))
    (growth,) = growths.replay([one], mapped).growths
    assert (growth.nbytes, growth.request_bytes, growth.free_bytes) == (30 * MIB, 50 * MIB, [20 * MIB])


@pytest.mark.parametrize("is_old", [True, False])
def test_rest_of_a_split_large_block_is_not_free(is_old: bool) -> None:
    """The allocator gives such a request 12 MiB, or all of its segment. Sizes of blocks are rounded up."""
    block = event("alloc", 0, 11.2001)
    events = [event("segment_alloc", 0, 12), block, event("segment_alloc", 50, 12), event("alloc", 50, 12)]
    segments = [segment(0, (12, "active_allocated")), segment(50, (12, "active_allocated"))]
    segments[0]["blocks"] = [{"size": -(-block["size"] // 512) * 512, "state": "active_allocated"}]
    history = growths.replay(segments, events[2 if is_old else 0 :])
    assert history.growths[-1].free_bytes == []
    assert history.peak_allocated_bytes == 12 * MIB + -(-block["size"] // 512) * 512


def test_a_history_may_end_out_of_memory() -> None:
    failed = {"action": "oom", "device_free": 5, "size": 90 * MIB, "stream": 0, "frames": []}
    events = [event("segment_map", 0, 10), failed, event("alloc", 0, 3)]
    ends = [segment(0, (3, "active_allocated"), (7, "inactive"))]
    assert growths.replay(ends, events) == growths.History(10 * MIB, 3 * MIB, [])


def written(path: Path, **snapshot: Any) -> Path:
    path.write_bytes(pickle.dumps(snapshot))
    return path


def test_the_command_prints_the_last_growths_and_the_peaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "h.pickle", segments=SEGMENTS_AT_END, device_traces=[FROM_SEGMENTS, []])
    rows = tmp_path / "rows.json"
    assert main.main([f"ours={file}", "--markdown", "--json", str(rows)]) == 0
    printed = capsys.readouterr().out
    assert "| ours | model.py:7 forward | 40 | 40 | 105 | 80 | 25 | 20 5 |" in printed
    assert "ours: peak reserved 145 MiB, peak allocated 120 MiB" in printed
    assert json.loads(rows.read_text())["free_bytes"] == [20 * MIB, 5 * MIB]
