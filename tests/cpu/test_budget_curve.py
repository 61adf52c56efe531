"""`tools/budget_curve.py` on the CPU: every setting runs, and what is held grows with the budget."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHAPE = "--device cpu --layers 4 --hidden 64 --tokens 64 --budgets 2 --warmup 8 --steps 1".split()


def test_budgets_are_measured_beside_predictions(tmp_path: Path) -> None:
    file = tmp_path / "curve.jsonl"
    command = [sys.executable, str(ROOT / "tools" / "budget_curve.py"), *SHAPE, "--json", str(file), "--markdown"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    none, everything, least, most = [json.loads(line) for line in file.read_text().splitlines()]
    assert everything["held_bytes"] < none["held_bytes"] and everything["moved_bytes"] > 0
    for record in (least, most):
        assert record["held_bytes"] <= record["predicted_bytes"] <= int(record["setting"])
        assert f"| {int(record['setting']) >> 20:,} MiB |" in done.stdout
    assert least["moved_bytes"] > 0 == most["moved_bytes"]
