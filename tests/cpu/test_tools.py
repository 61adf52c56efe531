# SPDX-License-Identifier: Apache-2.0
"""Options and errors that all programs in `tools` share."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tqdm")

from tests.dist.programs import BENCHMARK
from tests.tool_scripts import TOOLS


def test_a_benchmark_measures_the_package_that_is_installed(tmp_path: Path) -> None:
    """It may be compiled, which the one beside the benchmarks is not."""
    package = tmp_path / "offload_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('the one that is installed')")
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "gpu"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stderr.strip().endswith("the one that is installed")


@pytest.mark.parametrize(
    "script", sorted([*TOOLS.glob("*.sh"), TOOLS.parent / ".ci" / "run"]), ids=lambda path: path.name
)
def test_scripts_run_on_the_bash_of_macos(script: Path) -> None:
    """To version 3.2 an empty array is an unbound variable, and there is no `sha256sum` beside it."""
    if not script.exists():
        pytest.skip("the copy for the compiled core has no hidden folders: runs in the checkout")
    text = script.read_text()
    bare = [line for line in text.splitlines() if re.search(r'(?<!\+)"\$\{\w+\[@\]\}"', line)]
    assert not bare
    assert not re.search(r"\b(mapfile|readarray|declare -A)\b|\| sha256sum|\btar (?!.*-f -)", text)
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_the_quickstart_keeps_off_the_gpus() -> None:
    assert re.search(r'^export CUDA_VISIBLE_DEVICES=""$', (TOOLS / "quickstart.sh").read_text(), re.MULTILINE)


def test_the_quickstart_says_what_a_budget_predicted_and_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sys.path.insert(0, str(TOOLS))
    try:
        from quickstart import Run, budget_table, has_same_losses
    finally:
        sys.path.remove(str(TOOLS))

    def step(loss: float, mib: int, plan: dict[str, Any] | None) -> dict[str, Any]:
        rank = {"offload": {"peak_resident_saved_bytes": mib << 20, "plan": plan}}
        return {"loss": loss, "step_ms": 7.0, "ranks": [rank, rank]}

    plan = {"budget_bytes": 400 << 20, "predicted_peak_bytes": 390 << 20, "predicted_step_ms": 8.0}
    plain = Run([step(3.0, 600, None), step(2.0, 600, None)])
    budget = Run([step(3.0, 200, None), step(2.0, 200, None), step(1.0, 380, plan)])
    assert has_same_losses(plain, budget)
    table = budget_table(plain, budget)
    cells = [list(column.cells) for column in table.columns]
    assert cells[1][2:] == ["600 MiB"] * 2 and cells[2][2:] == ["390 MiB"] * 2 and cells[3][2:] == ["380 MiB"] * 2
    assert "400 MiB" in str(table.title) and "equal" in cells[3][0] and "NOT" not in cells[3][0]
    other = Run([step(3.0, 200, None), step(2.5, 200, None)])
    assert "NOT EQUAL" in list(budget_table(plain, other).columns[3].cells)[0]
