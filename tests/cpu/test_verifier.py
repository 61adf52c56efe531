# SPDX-License-Identifier: Apache-2.0
"""Corrections of decisions, step by step, on a decider that answers from a list."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from offload_engine._budget.verify import Verifier

BUDGET = 256 << 10
CLOSE = BUDGET // 256


@dataclass
class Scripted:
    """A decider whose decisions hold `held` bytes and take `step_ms`, one after the other; compute waits in each."""

    decisions: list[tuple[int, float]]
    guard_bytes: int = 8 * CLOSE
    budget_bytes: int = BUDGET
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

    def correct(self, nbytes: int) -> None:
        self.asked.append(f"correct {nbytes}")

    def take_in(self, error: int) -> None:
        self.asked.append(f"take in {error}")
        self.chosen.best.held_bytes += error

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
        assert verifier.judge(1) is not None
    assert verifier.judge(1) is None
    assert decider.asked == ["correct 1", "decide"] * 3 + ["take in 1"]


@pytest.mark.parametrize(
    ("guard", "then"),
    [pytest.param(8 * CLOSE, [4 * CLOSE, 2 * CLOSE], id="halved"), pytest.param(CLOSE, [CLOSE, CLOSE], id="least")],
)
def test_each_step_above_the_budget_leaves_half_the_guard(guard: int, then: list[int]) -> None:
    verifier, decider = verifier_of(*[(BUDGET, 10.0)] * 3, guard_bytes=guard)
    for expected in then:
        verifier.judge(1)
        assert decider.guard_bytes == expected


@pytest.mark.parametrize(("unused", "is_used"), [(5 * CLOSE, False), (5 * CLOSE + 1, True)])
def test_more_than_half_the_guard_is_used(unused: int, is_used: bool) -> None:
    verifier, decider = verifier_of((BUDGET - 8 * CLOSE, 10.0), (BUDGET, 9.0))
    allowed = verifier.judge(8 * CLOSE - unused)
    assert (allowed is not None) is is_used
    assert decider.asked[0] == f"take in {8 * CLOSE - unused}"


@pytest.mark.parametrize(("step_ms", "is_taken"), [(9.9, True), (10.0, False), (10.1, False)])
def test_what_was_left_is_used_where_that_saves_time(step_ms: float, is_taken: bool) -> None:
    verifier, decider = verifier_of((BUDGET - 8 * CLOSE, 10.0), (BUDGET, step_ms))
    first = decider.chosen
    assert (verifier.judge(0) is not None) is is_taken
    assert (decider.chosen is not first) is is_taken


def test_goes_back_to_what_fitted_where_using_more_went_over() -> None:
    verifier, decider = verifier_of((BUDGET - 8 * CLOSE, 10.0), (BUDGET, 9.0))
    first = decider.chosen
    verifier.judge(0)
    assert verifier.judge(1) is first
    assert decider.asked == ["take in 0", "correct 0", "decide", "correct 1", "go back"]


def test_keeps_the_floor_where_it_is_above_the_budget() -> None:
    for error, asked in ((1, []), (0, ["take in 0"])):
        verifier, decider = verifier_of((BUDGET, 10.0), is_at_floor=True)
        assert verifier.judge(error) is None and decider.asked == asked
