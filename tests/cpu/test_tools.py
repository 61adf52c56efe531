# SPDX-License-Identifier: Apache-2.0
"""What holds of several programs in `tools` and `benchmarks`, and of the commands that documents name."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tqdm")

from tests.dist.programs import ROOT
from tests.tool_scripts import load_tool


def test_the_benchmark_of_cpus_still_knows_the_engine(tmp_path: Path) -> None:
    """It runs; what it says of the time is not looked at."""
    from benchmarks import cpu

    assert cpu.main(["--repeats", "1", "--json", str(tmp_path / "cost.jsonl")]) == 0
    assert json.loads((tmp_path / "cost.jsonl").read_text())["kind"] == "group_cost"


def commands() -> list[str]:
    """Return the commands of the result files, each of which is one benchmark, without those of earlier commits."""
    texts = (file.read_text() for file in (ROOT / "docs" / "results").glob("*.json"))
    found = re.findall(r'"(?!at commit )[^"]*benchmarks/run\.py ((?:gpu|frontends) [^"\\]*)"', "\n".join(texts))
    return [command.replace("RIVALS", ".").partition("  #")[0] for command in found]


def test_the_commands_of_result_files_are_understood() -> None:
    assert len(commands()) > 10
    for command in commands():
        name, *flags = command.split()
        importlib.import_module(f"benchmarks.{name}.settings").parse(flags)


def test_the_quickstart_says_what_a_budget_predicted_and_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    quickstart = load_tool("quickstart")

    def write(name: str, losses: list[float], mib: int, plan: dict[str, Any] | None = None) -> None:
        offload = {"peak_resident_saved_bytes": mib << 20, "plan": plan, "prefetch_misses": 0}
        offload |= {"copied_out_bytes": 0, "copied_in_bytes": 0}
        ranks = [{"offload": offload, "rss_peak_bytes": 1 << 30}] * 2
        steps = [{"loss": loss, "step_ms": 7.0, "ranks": ranks, "offload": offload} for loss in losses]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, steps)))
        timeline = {"timeline": [[0.5, mib << 20], [1.0, 0]], "spans": [["F", 0.0, 0.5], ["B", 0.5, 1.0]]}
        (tmp_path / f"{name}.timeline.json").write_text(json.dumps({"ranks": [timeline] * 2}))

    plan = {"budget_bytes": 400 << 20, "predicted_peak_bytes": 390 << 20, "predicted_step_ms": 8.0}
    write("plain", [3.0, 2.0], 600)
    write("offload", [3.0, 2.0], 200)
    write("budget", [3.0, 2.0, 1.0], 380, plan)
    assert quickstart.main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    printed = " ".join(re.sub("[│┃]", " ", printed).split())
    assert "budget of 400 MiB" in printed and re.search(r"600 MiB 200 MiB \(-67%\) 380 MiB \(-37%\)", printed)
    assert "390 MiB predicted" in printed
    assert (tmp_path / "residency.png").read_bytes().startswith(b"\x89PNG")
    write("budget", [3.0, 2.5], 380, plan)
    assert quickstart.main([str(tmp_path)]) == 1 and "NOT EQUAL" in capsys.readouterr().out
