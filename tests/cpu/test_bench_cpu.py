"""`tools/bench_cpu.py` still knows the engine: its cheapest part runs. What it says of the time is not looked at."""

from __future__ import annotations

from pathlib import Path

from tests.dist.programs import ROOT, run_program


def test_cost_is_measured(tmp_path: Path) -> None:
    (printed,) = run_program(ROOT / "tools" / "bench_cpu.py", "cost", cwd=tmp_path)
    assert "handler calls of a group" in printed.out
