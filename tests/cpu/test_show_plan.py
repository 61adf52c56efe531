# SPDX-License-Identifier: Apache-2.0
"""tools/show_plan.py: what it prints, what it draws, and what it says about impossible shapes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from offload_engine.planning.plan import parse_plan, validate_plan
from offload_engine.schedule import format_actions, interleaved
from tests.tool_scripts import load_tool

pytest.importorskip("rich")
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "show_plan.py"


show_plan = load_tool("show_plan")


def show(capsys: pytest.CaptureFixture[str], arguments: str) -> str:
    assert show_plan.main(arguments.split()) == 0
    return capsys.readouterr().out


def words_of_rows(table: str) -> list[list[str]]:
    """Return the cells of a printed table, row by row (a wrapped row has several lines)."""
    rows: list[list[str]] = [[]]
    for line in table.splitlines():
        if line.startswith(("├", "└")):
            rows.append([])
        elif line.startswith("│"):
            rows[-1] += line.split("│")[2].split()
    return [row for row in rows if row]


@pytest.mark.parametrize("columns", [60, 200])
def test_prints_the_order_of_each_rank(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    printed = show(capsys, "--pp 2 --vpp 2 --microbatches 12")
    rows = words_of_rows(printed)
    assert len(rows) == 2
    for rank, row in enumerate(rows):
        actions = [word for word in row if not word.isdigit()]
        assert actions == format_actions(interleaved(2, rank, 2, 12)).split()
    assert all(len(line) <= columns for line in printed.splitlines())


MOVES = "--pp 2 --microbatches 3 --moves --layers 2 --tail mlp --head-ms 2.5"


def test_prints_the_moves_of_each_rank(capsys):
    printed = show(capsys, f"{MOVES} --names attention=200 mlp=100")
    texts = printed[printed.index("# rank 0") :].split("# rank ")[1:]
    assert "simulated" not in printed
    for rank, text in enumerate(texts):
        options = show_plan.make_parser().parse_args(f"{MOVES} --names attention=200 mlp=100".split())
        planned = show_plan.plan_moves(options)
        number, _, plan = text.partition("\n")
        assert (int(number), parse_plan(plan)) == (rank, planned.plans[rank])
        validate_plan(parse_plan(plan), planned.job.ranks[rank].actions, planned.job.ranks[rank].shapes)
    assert "F0.0:head  DROP 0.0:1" in texts[1] and "B0.0       DROP 0.1:1 0.1:2" in texts[0]


def test_simulates_what_has_milliseconds_and_draws_it(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    target = tmp_path / "timeline.png"
    printed = show(capsys, f"{MOVES} --names attention=200,2 mlp=100,3 --png {target}")
    options = show_plan.make_parser().parse_args(f"{MOVES} --names attention=200,2 mlp=100,3".split())
    simulation = show_plan.simulate_moves(show_plan.plan_moves(options))
    assert f"simulated step: {simulation.milliseconds:.1f} ms" in printed
    assert f"plot: {target}" in printed
    assert target.read_bytes().startswith(b"\x89PNG")


def test_a_budget_keeps_what_fits(capsys):
    assert "OUT" not in show(capsys, f"{MOVES} --names attention=200 mlp=100 --resident-mib 5000")
    assert "OUT" in show(capsys, f"{MOVES} --names attention=200 mlp=100 --resident-mib 700")
    assert "OUT" in show(capsys, f"{MOVES} --names attention=200MiB mlp=0.1g --resident-mib 0.7GiB")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--microbatches 1 --moves --names a=x", "expected NAME, NAME=MIB or NAME=MIB,MS, got 'a=x'"),
        ("--microbatches 1 --moves --names a --tail b", "--tail must be one of a, got b"),
        ("--pp 4 --vpp 2 --microbatches 3", "group_size must be in [num_stages=4, num_microbatches=3], got 4"),
        ("--pp 2", "required: --microbatches"),
        ("--microbatches 1 --png plan.png", "--png draws what is simulated: it needs --moves"),
    ],
)
def test_bad_input(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        show_plan.main(arguments.split())
    assert message in " ".join(capsys.readouterr().err.split())


def test_as_a_command():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPT), "--pp", "2", "--microbatches", "1", "--rank", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "F0.0 B0.0" in done.stdout
