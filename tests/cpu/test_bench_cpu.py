"""`tools/bench_cpu.py` still knows the engine: its cheapest part runs. What it says of the time is not looked at."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_cost_is_measured() -> None:
    command = [sys.executable, str(ROOT / "tools" / "bench_cpu.py"), "cost"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    assert "handler calls of a group" in done.stdout
