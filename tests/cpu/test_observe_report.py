# SPDX-License-Identifier: Apache-2.0
"""Tables of recorded steps: sums, folding, why a tensor stayed, the moves, and the command."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from offload_engine._observe.chrome_trace import write_trace
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
from offload_engine._observe.report import moves_text, report_table, why_text
from offload_engine.planning.moves import DROP, IN, OUT
from offload_engine.report import main

MIB = 1 << 20
NUM_LAYERS = 4


def saved(
    group: str, storage: int, reason: Reason, nbytes: int = MIB, *, name: str = "attn", module: str = ""
) -> SavedRecord:
    return SavedRecord(group, name if ":" in group else "", module, (512, 512), "float32", nbytes, storage, reason)


def a_step(
    rank: int = 0, small_bytes: int = 1024, unasked: Reason = Reason.NOT_ASKED, names: str = "attn"
) -> StepRecord:
    """A chunk of four layers: two tensors over one storage in each, the last layer kept; outside: small and unasked."""
    reasons = [Reason.MOVED] * (NUM_LAYERS - 1) + [Reason.KEPT]
    groups = [GroupRecord(f"1.0:{i}", names.format(i), i, i == NUM_LAYERS - 1, MIB) for i in range(NUM_LAYERS)]
    inside = [saved(f"1.0:{i}", i, reason) for i, reason in enumerate(reasons) for _ in range(2)]
    outside = [
        saved("1.0", -1, Reason.TOO_SMALL, small_bytes, module=f"module.decoder.layers.{i}.norm")
        for i in range(NUM_LAYERS)
    ]
    return StepRecord(
        rank=rank,
        step=3,
        begin_unix_ns=0,
        duration_ms=10.0,
        counts={"prefetch_misses": 5},
        groups=tuple(groups),
        moves=(MoveRecord(1.0, "F1.0:0", OUT, "1.0:0", MIB), MoveRecord(2.5, "F1.0:1", DROP, "1.0:0", MIB)),
        copies=(
            CopyRecord(OUT, "1.0:0", 4_000_000, 0.0, 1.0, 2.0),
            CopyRecord(OUT, "1.0:1", 8_000_000, 0.0, 2.0, 3.0),
            CopyRecord(IN, "1.0:0", 4_000_000, 0.0, 5.0, 7.0),
        ),
        waits=(
            WaitRecord(Awaited.COPY_IN, "1.0:0", 6.0, 7.0),
            WaitRecord(Awaited.COPY_IN, "1.0:2", 8.0, 8.5),
            WaitRecord(Awaited.COPY_IN, "1.0:1", 9.0, 9.002),
        ),
        stages=(
            StageRecord("1.0:0", "packed", 0.5, 1.0),
            StageRecord("1.0:0", "copying out", 1.0, 2.1),
            StageRecord("1.0:1", "packed", 1.5, 9.0),
            StageRecord("1.0:2", "packed", 9.0, 9.5),
        ),
        counters=(CounterRecord(1.0, MIB, 0, 0), CounterRecord(2.5, 2 * MIB, MIB, MIB)),
        saved=(*inside, *outside, saved("1.0", 9, unasked, module="module.decoder.layers.0.mlp.fc2")),
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
    assert report_table([]) == "no step was recorded\n"


# ---- the command ----


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return [str(write_trace(a_step(rank), tmp_path / f"rank{rank}.json.gz")) for rank in range(2)]


def test_the_command_gathers_files(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in (
        (files, report_table([a_step(0), a_step(1)])),
        ([*files, "--rank", "1"], report_table([a_step(1)])),
        ([files[0], "--why", "norm"], why_text([a_step(0)], "norm")),
        ([files[0], "--moves", "--group", "1.0:0"], moves_text([a_step(0)], "1.0:0")),
    ):
        assert main(arguments) == 0
        assert capsys.readouterr().out == expected
    for wrong, message in (
        (["--rank", "7"], "no step of rank 7: the files have ranks 0, 1"),
        (["--why", "("], "--why (: not a regular expression: missing ), unterminated"),
    ):
        assert main([*files, *wrong]) == 1
        captured = capsys.readouterr()
        assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


NOT_JSON = "is not a trace: not complete, or not JSON"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cut.json", b'{"traceEvents": [', NOT_JSON),
        ("list.json", b"[1, 2]", "expected a JSON object, got a list"),
        ("plain.json.gz", b"{}", NOT_JSON),
        ("cut.json.gz", gzip.compress(b"{}" * 999, mtime=0)[:20], NOT_JSON),
        ("profile.json", b'{"traceEvents": []}', "has no recorded step: expected a file of engine.record(FILE)"),
        ("damaged.json", b'{"offloadEngineSteps": [{"version": 1}]}', "it is damaged"),
        ("other.json", b'{"offloadEngineSteps": [{"version": 0}]}', "a recorded step of version 0, expected 1"),
        ("missing.json", None, "No such file"),
        (".", None, "Is a directory"),
    ],
)
def test_a_file_that_is_no_recording_is_named(
    name: str, content: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    merges = ["--merge", str(tmp_path / "both.json")]
    for arguments in ([], merges) if content is not None and b"Steps" not in content else ([],):
        assert main([str(path), *arguments]) == 1
        error = capsys.readouterr().err
        assert str(path) in error and (arguments or message in error) and error.count("\n") == 1
