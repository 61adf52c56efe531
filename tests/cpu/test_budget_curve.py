# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/run.py budget_curve` on the CPU: all settings run, budgets hold, the picture is drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist.programs import BENCHMARK, run_program

TINY = "--device cpu --tiny --layers 4 --budgets 2 --iters 1 --warmup 1".split()


def test_budgets_are_measured_beside_settings_by_hand(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "curve.json", tmp_path / "curve.png"
    (printed,) = run_program(BENCHMARK, "budget_curve", *TINY, "--json", str(file), "--markdown", cwd=tmp_path)
    [length] = json.loads(file.read_text())["lengths"]
    turns = {turn["setting"]: turn for turn in length["turns"] if turn["budget_bytes"] is None}
    budgets = [turn for turn in length["turns"] if turn["budget_bytes"] is not None]
    assert not length["left_out"] and not any(turn["failure"] for turn in length["turns"])
    assert turns["all"]["held_bytes"] < turns["none"]["held_bytes"]
    assert {"layers", "layers_ckpt", "every_other", "half_ckpt", "any_model"} <= set(turns)
    assert len(budgets) == 2
    for turn in budgets:
        assert turn["held_bytes"] <= turn["predicted_bytes"] <= turn["budget_bytes"]
        assert turn["steps_until_held"] >= 4 and turn["first_predicted_bytes"] and turn["host_ms"] > 0
    assert all(turn["parity"]["is_bitwise_equal"] for turn in length["turns"])
    assert "| best by hand that fits |" in printed.out
    run_program(BENCHMARK, "budget_curve", "--draw", str(file), "--plot", str(picture), cwd=tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
