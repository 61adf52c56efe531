"""`tools/budget_curve.py` on the CPU: every setting runs, budgets hold, and the picture is drawn from the results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = "--device cpu --tiny --layers 4 --budgets 2 --iters 1 --warmup 1".split()


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "budget_curve.py"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_budgets_are_measured_beside_settings_by_hand(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "curve.json", tmp_path / "curve.png"
    done = run(*TINY, "--json", file, "--markdown")
    assert done.returncode == 0, done.stderr[-2000:]
    [length] = json.loads(file.read_text())["lengths"]
    turns = {turn["setting"]: turn for turn in length["turns"] if turn["budget_bytes"] is None}
    budgets = [turn for turn in length["turns"] if turn["budget_bytes"] is not None]
    assert not length["left_out"] and not any(turn["failure"] for turn in length["turns"])
    assert turns["all"]["held_bytes"] < turns["none"]["held_bytes"]
    assert {"layers", "layers_ckpt", "every_other", "half_ckpt", "any_model"} <= set(turns)
    assert len(budgets) == 2
    for turn in budgets:
        assert turn["held_bytes"] <= turn["predicted_bytes"] <= turn["budget_bytes"]
        assert turn["steps_until_held"] >= 5 and turn["first_predicted_bytes"] and turn["host_ms"] > 0
    assert all(turn["parity"]["is_bitwise_equal"] for turn in length["turns"])
    assert "| best by hand that fits |" in done.stdout
    done = run("--draw", file, "--plot", picture)
    assert done.returncode == 0, done.stderr[-2000:]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_turn_that_would_begin_too_late_is_left_out(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "curve.json"
    done = run(*TINY, "--json", file, "--seconds", "0")
    assert done.returncode == 0, done.stderr[-2000:]
    [length] = json.loads(file.read_text())["lengths"]
    assert not length["turns"] and length["left_out"][:2] == ["none", "all"]
    assert "left out, as the time was over: none, all" in " ".join(done.stdout.split())


def test_mistakes_are_told_at_once(tmp_path: Path) -> None:
    for arguments, told in ((["--draw", tmp_path], "give it"), (["--budgets", 0], "must be at least 1")):
        done = run(*arguments)
        assert done.returncode == 2 and told in done.stderr
