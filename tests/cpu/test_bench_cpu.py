"""`benchmarks/run.py cpu` still knows the engine: its cheapest part runs. What it says of the time is not looked at."""

from __future__ import annotations

from pathlib import Path

from tests.dist.programs import BENCHMARK, run_program


def test_cost_is_measured(tmp_path: Path) -> None:
    (printed,) = run_program(BENCHMARK, "cpu", "cost", cwd=tmp_path)
    assert "handler calls of a group" in printed.out
