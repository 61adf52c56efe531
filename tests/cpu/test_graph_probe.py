"""The probe of CUDA graphs, as far as it runs without a GPU: its steps, its table, and that one failure is only one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tool_scripts import TOOLS


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))


def test_two_steps_are_equal_to_the_last_bit() -> None:
    from graph_probe.stage import Job, Shape

    job = Job(Shape(layers=2, hidden=32, ffn=64, heads=2, seq=16, microbatches=3, device="cpu"))
    job.step()
    bits = job.bits()
    assert any(bits["grads"].values())
    job.step()
    assert job.bits() == bits
    next(job.stage.parameters()).grad[0] += 1e-3  # type: ignore[index]
    assert job.bits() != bits


def table(rows: list[dict[str, Any]], tmp_path: Path) -> list[list[str]]:
    from graph_probe.main import table

    path = tmp_path / "probe.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [line.split() for line in table(path).splitlines()[1:]]


def test_the_table_compares_bits_within_a_part(tmp_path: Path) -> None:
    one, other = {"losses": [1.0]}, {"losses": [2.0]}
    rows = [
        {"part": "bits", "of": "eager", "stage": "warm", "bits": one},
        {"part": "bits", "of": "graph", "stage": "compared", "bits": one},
        {"part": "bits", "of": "graph", "stage": "compared", "bits": other},
        {"part": "bits", "stage": "end", "status": 0},
        {"part": "dump", "stage": "warm", "bits": other},
        {"part": "dump", "stage": "end", "status": 1},
        {"part": "beside", "of": "qkv", "stage": "timed", "step_ms": 3.5, "over_none": 1.002},
    ]
    assert table(rows, tmp_path) == [
        ["bits", "eager", "1/1", "0"],
        ["bits", "graph", "1/2", "0"],
        ["dump", "1/1", "1"],
        ["beside", "qkv", "3.5", "1.002", "left", "out"],
    ]


def test_a_step_that_fails_keeps_no_other_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    from graph_probe import bits

    def run_whole(shape: Any, part: Any, *, is_captured: bool, emit: Any, **more: Any) -> None:
        if is_captured and part == "qkv":
            raise RuntimeError("of the test")
        emit(stage="compared", bits={})

    def run_layers(shape: Any, part: Any, rounds: int, *, emit: Any, exact: bool) -> None:
        emit(stage="compared", bits={})

    monkeypatch.setattr(bits, "run_whole", lambda shape, **own: run_whole(shape, own.pop("part"), **own))
    monkeypatch.setattr(bits, "run_layers", run_layers)
    rows: list[dict[str, Any]] = []
    bits.run_bits(None, lambda **row: rows.append(row))  # type: ignore[arg-type]
    assert [row["of"] for row in rows if row["stage"] == "failed"] == ["graph qkv"]
    assert "of the test" in next(row["traceback"] for row in rows if row["stage"] == "failed")
    assert len(rows) == len(bits.STEPS) + 3


def test_steps_take_turns() -> None:
    from graph_probe.beside import _summary, _turned

    assert [_turned(["a", "b", "c"], number)[0] for number in range(4)] == ["a", "b", "c", "a"]
    found = _summary([2.2, 4.4, 2.0], [2.0, 4.0, 2.0])
    assert found["over_none"] == 1.1  # each over the one of its own round
