# SPDX-License-Identifier: Apache-2.0
"""Corrections of decisions, step by step, on a decider that answers from a list."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from offload_engine._budget.verify import Verifier
from offload_engine.planning.memory import Excess

BUDGET = 256 << 10
CLOSE = BUDGET // 256


@dataclass
class Scripted:
    """A decider whose decisions hold `held` bytes and take `step_ms`, one after the other; compute waits in each."""

    decisions: list[tuple[int, float]]
    guard_bytes: int = 8 * CLOSE
    budget_bytes: int = BUDGET
    margin_bytes: int = 0
    is_at_floor: bool = False
    actions: tuple[Any, ...] = ()
    asked: list[str] = field(default_factory=list)
    chosen: Any = None

    def decide(self, actions: tuple[Any, ...] = ()) -> Any:
        self.asked.append("decide")
        held, step_ms = self.decisions.pop(0)
        best = SimpleNamespace(held_bytes=held, step_ms=step_ms, stalled_ms=1.0, recomputed_bytes=0)
        self.chosen = SimpleNamespace(best=best)
        return self.chosen

    def correct(self, excess: Excess) -> None:
        self.asked.append(f"correct {excess.total}")

    def take_in(self, excess: Excess) -> None:
        self.asked.append(f"take in {excess.total}")
        self.chosen.best.held_bytes += excess.total

    def go_back(self, to: Any) -> Any:
        self.asked.append("go back")
        self.chosen = to
        return to


def verifier_of(*decisions: tuple[int, float], **settings: Any) -> tuple[Verifier, Any]:
    decider = Scripted(list(decisions), **settings)
    decider.decide()
    decider.asked.clear()
    verifier = Verifier(decider)  # type: ignore[arg-type]
    verifier.begin()
    return verifier, decider


def test_a_third_correction_is_made_and_a_fourth_is_only_taken_in() -> None:
    verifier, decider = verifier_of(*[(BUDGET, 10.0)] * 4)
    for _ in range(3):
        assert verifier.judge(Excess(1)) is not None
    assert verifier.judge(Excess(1)) is None
    assert decider.asked == ["correct 1", "decide"] * 3 + ["take in 1"]


@pytest.mark.parametrize(
    ("guard", "then"),
    [pytest.param(8 * CLOSE, [4 * CLOSE, 2 * CLOSE], id="halved"), pytest.param(CLOSE, [CLOSE, CLOSE], id="least")],
)
def test_each_step_above_the_budget_leaves_half_the_guard(guard: int, then: list[int]) -> None:
    verifier, decider = verifier_of(*[(BUDGET, 10.0)] * 3, guard_bytes=guard)
    for expected in then:
        verifier.judge(Excess(1))
        assert decider.guard_bytes == expected


@pytest.mark.parametrize(("unused", "is_used"), [(3 * CLOSE, False), (3 * CLOSE + 1, True)])
def test_more_than_a_quarter_of_the_guard_is_used(unused: int, is_used: bool) -> None:
    verifier, decider = verifier_of((BUDGET - 8 * CLOSE, 10.0), (BUDGET, 9.0))
    allowed = verifier.judge(Excess(8 * CLOSE - unused))
    assert (allowed is not None) is is_used
    assert decider.asked[0] == f"take in {8 * CLOSE - unused}"


@pytest.mark.parametrize(("step_ms", "is_taken"), [(9.9, True), (10.0, False), (10.1, False)])
def test_what_was_left_is_used_where_that_saves_time(step_ms: float, is_taken: bool) -> None:
    verifier, decider = verifier_of((BUDGET - 8 * CLOSE, 10.0), (BUDGET, step_ms))
    first = decider.chosen
    assert (verifier.judge(Excess(0)) is not None) is is_taken
    assert (decider.chosen is not first) is is_taken


def test_goes_back_to_what_fitted_where_using_more_went_over() -> None:
    verifier, decider = verifier_of((BUDGET - 8 * CLOSE, 10.0), (BUDGET, 9.0))
    first = decider.chosen
    verifier.judge(Excess(0))
    assert verifier.judge(Excess(1)) is first
    assert decider.asked == ["take in 0", "correct 0", "decide", "correct 1", "go back"]


def test_uses_what_is_left_as_long_as_a_correction_can_take_it_back() -> None:
    left = BUDGET - 8 * CLOSE
    verifier, decider = verifier_of(*[(left, step_ms) for step_ms in (10.0, 9.0, 8.0, 7.0)])
    assert verifier.judge(Excess()) is not None and verifier.judge(Excess()) is decider.chosen
    third = decider.chosen
    assert verifier.judge(Excess()) is None and decider.chosen is third


def test_tries_no_more_once_a_step_went_over() -> None:
    verifier, decider = verifier_of((BUDGET, 10.0), (BUDGET - 8 * CLOSE, 11.0), (BUDGET, 10.0))
    assert verifier.judge(Excess(1)) is not None
    assert verifier.judge(Excess()) is None and decider.asked[-1] == "take in 0"


def test_what_was_measured_of_one_step_fits_another_with_a_margin_only() -> None:
    """A budget of experts held 76 MiB too much in one step: the step that was measured had happened to take less."""
    for margin, is_good in ((CLOSE, True), (CLOSE + 1, False)):
        verifier, _ = verifier_of((BUDGET - CLOSE, 10.0), (BUDGET - 2 * CLOSE, 10.0), margin_bytes=margin)
        assert (verifier.judge(Excess()) is None) is is_good


def test_keeps_the_floor_where_it_is_above_the_budget() -> None:
    for error, asked in ((1, []), (0, ["take in 0"])):
        verifier, decider = verifier_of((BUDGET, 10.0), is_at_floor=True)
        assert verifier.judge(Excess(error)) is None and decider.asked == asked
