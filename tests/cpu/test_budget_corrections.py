# SPDX-License-Identifier: Apache-2.0
"""Decisions and their corrections, with what budgets on H200s have reserved in vain."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from threading import Barrier
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from offload_engine._budget.decide import _WASTED_SHARE, Decider, excess_of
from offload_engine._budget.floor import FloorSteps
from offload_engine._budget.known import Known
from offload_engine._budget.verify import Verifier
from offload_engine.planning.choose import choose
from offload_engine.planning.memory import (
    _WASTED_BEYOND,
    _WASTED_IN_PIPELINE,
    _WASTED_KEEPING,
    _WASTED_MOVING,
    Excess,
)
from offload_engine.planning.predict import Costs, held_with
from offload_engine.planning.steps import Decision, Steps
from tests.cpu.test_choose import GIB, one_rank

RESULTS = Path(__file__).parents[2] / "docs/results/2026-11-26_budget_h200.jsonl"
MIB = 1 << 20


@pytest.mark.parametrize(
    ("num_chunks", "chunk_bytes", "expected"),
    [(4, 100.0, 7.0), (4, 102.0, 7.0), (4, 90.0, 9.0), (2, 100.0, 9.0)],
    ids=["alike", "other routing", "shorter sequences", "other microbatches"],
)
def test_the_shortest_step_counts_of_those_like_the_measured_one(
    num_chunks: int, chunk_bytes: float, expected: float
) -> None:
    floor = FloorSteps(None)
    floor.begin_state()
    for step in ((num_chunks, chunk_bytes, 7.0), (4, 100.0, 9.0)):
        floor.note_time(SimpleNamespace(**dict(zip(("num_chunks", "chunk_bytes", "milliseconds"), step, strict=True))))  # type: ignore[arg-type]
    assert floor.milliseconds == expected


class Wasted(NamedTuple):
    """Bytes that steps with the first decision within a budget have reserved in vain, settled, on one rank."""

    floor: float
    """With everything offloaded."""
    predicted: float
    held: float


def wasted() -> list[Wasted]:
    found, floors = [], dict[tuple[str, int], float]()
    for turn in map(json.loads, RESULTS.read_text().splitlines()):
        if turn["kind"] != "turn" or turn["contender"] != "budget":
            continue
        budget, place = turn["budget"], (turn["setup"], turn["rank"])
        outside, allocated = turn["outside_bytes"], turn["peak_allocated_bytes"]
        steps: dict[str, int] = {step["state"]: step["held_bytes"] for step in budget["steps"]}  # the last of each
        measured = steps["MEASURE"] - outside
        is_all_kept = budget["gpu_budget"] is None
        if is_all_kept:  # what is allocated is predicted exactly, and five eighths of what the floor wastes beside it
            first = next(step["predicted_bytes"] for step in budget["steps"] if step["predicted_bytes"])
            floors[place] = measured - (first - outside - allocated) * 8 / 5
        floor = measured - floors[place]
        share = _WASTED_IN_PIPELINE if turn["setup"].startswith("c") else _WASTED_KEEPING
        beyond = _WASTED_BEYOND * (allocated - floors[place]) if share == _WASTED_IN_PIPELINE else 0.0
        predicted = max(share * floor, beyond) if is_all_kept else _WASTED_MOVING * floor
        found.append(Wasted(floor, predicted, steps["VERIFY"] - outside - allocated))
    return found


def test_what_is_reserved_in_vain_is_predicted_within_what_gpus_have_shown() -> None:
    """Predictions were up to 1.3 GiB too low where several chunks wait and nothing moves."""
    every = wasted()
    errors = sorted(each.predicted - each.held for each in every)
    assert len(errors) == 26 and errors[0] > -512 * MIB and errors[-3] < 550 * MIB
    # One rank's floor wasted 3.6 GiB, and its decisions 1.4 to 2.3.
    assert errors[-1] < 1600 * MIB and median(map(abs, errors)) < 256 * MIB
    assert all(each.held - each.predicted <= _WASTED_SHARE * each.floor for each in every)  # the guard is enough


WASTED = 2 * GIB
SHARES = 0.15, 0.5
WASTES = [
    ((0.4, 0.94), (3, 3)),  # it could not grow as much again
    ((1.16, 1.22), (3, 4)),  # with the first share it is over at once
    ((0.93, 0.73), (2, 2)),
    ((0.3, 0.5), (2, 2)),
    ((1.09, 1.02), (2, 2)),
    ((0.71, 0.65), (2, 2)),
    ((0.98, 1.25), (5, 4)),  # with the first share nothing is left behind the correction
]
"""What the first and the later steps have reserved in vain, of what the floor had; and how many verify, by share."""


@pytest.mark.parametrize("index", range(len(SHARES)))
@pytest.mark.parametrize(("wastes", "num_steps"), WASTES, ids=str)
def test_decisions_end_within_the_budget(wastes: tuple[float, float], num_steps: tuple[int, ...], index: int) -> None:
    share = SHARES[index]
    job, base = one_rank()
    model = dataclasses.replace(base, overhead_bytes=base.overhead_bytes + WASTED, wasted_bytes=WASTED)
    ends = choose(job, model, 1 << 50, Costs())
    budget = round(ends.floor.held_bytes + share * (ends.top.held_bytes - ends.floor.held_bytes))
    decider: Any = Decider(budget, None, None, is_early_certain=True)  # type: ignore[arg-type]
    decider.known, decider.guard_bytes = Known(job, model, Costs()), round(_WASTED_SHARE * WASTED)
    decider.decide()
    verifier, steps = Verifier(decider), Steps(job, Costs().link)
    verifier.begin()
    held, decided = list[int](), None
    while len(held) < 6:
        peak = held_with(base, steps, decider.chosen.best.decision) - base.overhead_bytes
        wasted, decided = wastes[decider.chosen is decided], decider.chosen
        held.append(peak + base.overhead_bytes + round(wasted * WASTED))
        excess = excess_of(decider, held[-1], peak)
        was_settled = verifier.settles(decider.actions, excess)
        if (was_settled or not verifier.fits(excess)) and verifier.judge(excess) is None:
            break
    assert len(held) == num_steps[index]
    assert max(held[2:] or held) <= budget and held[-1] == decider.chosen.best.held_bytes


class Ranks:
    """Deciders that agree with each other, each in a thread of its own."""

    def __init__(self, number: int, varied_share: float) -> None:
        self._said: list[tuple[int, ...]] = [()] * number
        self._barrier = Barrier(number, timeout=30.0)
        self.deciders = [self._decider(rank, varied_share) for rank in range(number)]

    def _decider(self, rank: int, varied_share: float) -> Any:
        def agree(numbers: tuple[int, ...]) -> tuple[int, ...]:
            self._said[rank] = numbers
            self._barrier.wait()
            most = tuple(map(max, zip(*self._said, strict=True)))
            self._barrier.wait()
            return most

        job, model = one_rank()
        ends = choose(job, model, 1 << 50, Costs())
        budget = (ends.floor.held_bytes + ends.top.held_bytes) // 2
        decider: Any = Decider(budget, None, None, is_early_certain=True)  # type: ignore[arg-type]
        decider.agree, decider.known = agree, Known(job, model, Costs(), varied_share)
        decider.decide()
        return decider

    def level(self) -> list[bool]:
        with ThreadPoolExecutor(len(self.deciders)) as pool:
            return list(pool.map(Decider.level, self.deciders))

    def decisions(self) -> set[Decision]:
        return {decider.decide() and decider.chosen.best.decision for decider in self.deciders}


@pytest.mark.parametrize(
    ("excess", "varied_share"), [(Excess(GIB, 0), 0.1), (Excess(0, GIB), 0.0), (Excess(-GIB, 2 * GIB), 0.0)]
)
def test_ranks_decide_alike_again_after_one_has_kept_less_by_itself(excess: Excess, varied_share: float) -> None:
    """Also where it has corrected what is reserved in vain, and where it leaves another margin with what it keeps."""
    ranks = Ranks(2, varied_share)
    alone, _ = ranks.deciders
    before = alone.chosen.best.decision
    alone.correct(excess)
    alone.decide(is_alone=True)
    assert alone.chosen.best.decision != before
    assert ranks.level() == [True, True]
    assert len(ranks.decisions()) == 1 and alone.chosen.best.decision != before
    assert ranks.level() == [False, False]
