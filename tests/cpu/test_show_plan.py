# SPDX-License-Identifier: Apache-2.0
"""tools/show_plan.py: what it prints and what it draws."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload_engine.planning.plan import parse_plan, validate_plan
from tests.tool_scripts import load_tool

pytest.importorskip("rich")
show_plan = load_tool("show_plan")
MOVES = "--pp 2 --microbatches 3 --moves --layers 2 --tail mlp --head-ms 2.5 --names"


def show(capsys: pytest.CaptureFixture[str], arguments: str) -> str:
    assert show_plan.main(arguments.split()) == 0
    return capsys.readouterr().out


def test_prints_simulates_and_draws_the_moves(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "timeline.png"
    arguments = f"{MOVES} attention=200,2 mlp=100,3"
    printed = show(capsys, f"{arguments} --png {target}")
    job, plans = show_plan.plan_moves(show_plan.make_parser().parse_args(arguments.split()))
    simulation = show_plan.simulate(job, plans)
    assert f"simulated step: {simulation.milliseconds:.1f} ms" in printed
    assert target.read_bytes().startswith(b"\x89PNG")
    for rank, text in enumerate(show(capsys, f"{MOVES} attention=200 mlp=100").split("# rank ")[1:]):
        plan = parse_plan(text.partition("\n")[2])
        validate_plan(plan, job.ranks[rank].actions, job.ranks[rank].shapes)
        assert ("F0.0:head  DROP 0.0:1" if rank else "B0.0       DROP 0.1:1 0.1:2") in text
    assert "OUT" not in show(capsys, f"{MOVES} attention=200 mlp=100 --resident-mib 5000")
    assert "OUT" in show(capsys, f"{MOVES} attention=200MiB mlp=0.1g --resident-mib 0.7GiB")
