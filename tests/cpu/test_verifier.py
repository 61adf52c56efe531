# SPDX-License-Identifier: Apache-2.0
"""Corrections of decisions, step by step, on a decider that answers from a list."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from offload_engine._budget.verify import Verifier
from offload_engine.planning.memory import Excess
from offload_engine.schedule import no_pipelining

BUDGET = 256 << 10
CLOSE = BUDGET // 256


class Scripted:
    """A decider whose decisions hold so many bytes, one after the other."""

    guard_bytes, budget_bytes, actions = 8 * CLOSE, BUDGET, ()
    model = SimpleNamespace(has_groups_alone=False)
    known = SimpleNamespace(note_excess=lambda prediction, actions, excess: excess, model=model)

    def __init__(self, *decisions: int, margin_bytes: int = 0, is_at_floor: bool = False) -> None:
        self.decisions, self.asked = list(decisions), list[str]()
        self.margin_bytes, self.is_at_floor = margin_bytes, is_at_floor
        self.decide()
        self.asked.clear()

    def decide(self, actions: tuple[Any, ...] = ()) -> Any:
        self.asked.append("decide")
        sizes = {"held_bytes": self.decisions.pop(0), "resident_bytes": 0, "recomputed_bytes": 0}
        self.chosen = SimpleNamespace(best=SimpleNamespace(step_ms=10.0, **sizes))
        return self.chosen

    def correct(self, excess: Excess) -> None:
        self.asked.append(f"correct {excess.total}")

    def take_in(self, excess: Excess) -> None:
        self.asked.append(f"take in {excess.total}")
        self.chosen.best.held_bytes += excess.total


def verifier_of(*decisions: int, **settings: Any) -> tuple[Verifier, Any]:
    decider: Any = Scripted(*decisions, **settings)
    verifier = Verifier(decider)
    verifier.begin()
    return verifier, decider


def test_a_third_correction_is_made_and_a_fourth_is_only_taken_in() -> None:
    verifier, decider = verifier_of(*[BUDGET] * 5)
    for _ in range(3):
        assert not verifier.settles((), Excess()) and verifier.settles((), Excess())
        assert verifier.judge(Excess(1)) is decider.chosen
    assert verifier.judge(Excess(1)) is None
    assert decider.asked == ["correct 1", "decide"] * 3 + ["take in 1"]
    verifier.begin()
    decider.chosen.best.held_bytes = BUDGET
    assert verifier.judge(Excess(1)) is decider.chosen


def test_steps_with_other_microbatches_have_a_first_step_of_their_own() -> None:
    verifier, _ = verifier_of(BUDGET)
    four, two = (tuple(no_pipelining(number)) for number in (4, 2))
    assert [verifier.settles(actions, Excess()) for actions in (four, two, four, two)] == [False, False, True, True]


def test_a_step_within_the_budget_is_taken_in_and_leaves_the_decision() -> None:
    """Using what it leaves would reserve more in vain than was left, in three of five budgets on an H200."""
    for error in (0, -BUDGET // 2):
        verifier, decider = verifier_of(BUDGET)
        assert verifier.judge(Excess(error)) is None and decider.asked == [f"take in {error}"]


def test_what_was_measured_of_one_step_fits_another_with_a_margin_only() -> None:
    """A budget of experts held 76 MiB too much in one step: the step that was measured had happened to take less."""
    for margin, is_good in ((CLOSE, True), (CLOSE + 1, False)):
        verifier, _ = verifier_of(BUDGET - CLOSE, BUDGET - 2 * CLOSE, margin_bytes=margin)
        assert (verifier.judge(Excess()) is None) is is_good


@pytest.mark.parametrize("error", [0, 1])
@pytest.mark.parametrize("margin", [0, CLOSE])
def test_keeps_the_floor_and_says_so_where_it_is_above_the_budget(
    error: int, margin: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One that only lacks the margin is within the budget: the warning would name the lowest budget below it."""
    verifier, decider = verifier_of(BUDGET, is_at_floor=True, margin_bytes=margin)
    assert verifier.judge(Excess(error)) is None and decider.asked == [f"take in {error}"]
    assert ["gpu_budget is 256.00 KiB, " in each.message for each in caplog.records] == [True] * error
    assert all("of which 256.00 KiB are weights" in each.message for each in caplog.records)


def test_what_a_floor_that_recomputes_reserves_in_vain_is_noted_for_its_decision() -> None:
    verifier, decider = verifier_of(BUDGET, BUDGET, is_at_floor=True)
    best, noted = decider.chosen.best, list[Any]()
    best.recomputed_bytes, decider.known = 1, SimpleNamespace(note_wasted=lambda *all: noted.append(all))
    assert verifier.judge(Excess(2, 3)) is decider.chosen
    assert noted == [(best, (), 3)] and decider.asked == ["correct 2", "decide"]


@pytest.mark.parametrize(
    ("left", "excesses", "is_at_floor", "num_steps"),
    [
        (2, [-2, 0], False, 2),
        (1, [-2, 0], False, 3),
        *((left, excesses, False, 2) for left in (1, 2) for excesses in ([0, 0], [0, -2])),
        (0, [-31, -15, -7, -3, -1], False, 4),  # one whose steps grow and grow
        (0, [-31, -15, -7, -3, -1], True, 2),  # at once: nothing more could leave
    ],
)
def test_a_step_judges_once_the_next_could_grow_as_much(
    left: int, excesses: list[int], is_at_floor: bool, num_steps: int
) -> None:
    """Later steps are as the last of `excesses`."""
    verifier, _ = verifier_of(BUDGET - left, is_at_floor=is_at_floor)
    judged = (verifier.settles((), e) or not verifier.fits(e) for e in map(Excess, (*excesses, *excesses[-1:] * 9)))
    assert list(judged).index(True) + 1 == num_steps


@pytest.mark.parametrize("is_planned", [True, False])
@pytest.mark.parametrize("less", [BUDGET // 128, BUDGET // 128 + 1])
def test_behind_a_step_that_no_plan_knew_one_with_much_less_than_predicted_does_not_judge(
    less: int, is_planned: bool
) -> None:
    """The allocator was emptied: the first step in it held 1,546 MiB less on an H200, the next ones 502 more."""
    verifier, _ = verifier_of(BUDGET // 2)
    assert not verifier.settles((), Excess(), is_planned=is_planned)
    judges = is_planned or less <= BUDGET // 128
    assert verifier.settles((), Excess(-less)) is judges
    assert verifier.settles((), Excess(-less)), "the next one does"
    verifier.begin()
    assert not verifier.settles((), Excess()) and verifier.settles((), Excess(-less)), "of another decision"


def test_a_first_decision_begins_without_the_steps_of_an_earlier_one() -> None:
    verifier, _ = verifier_of(BUDGET)
    assert not verifier.settles((), Excess())
    verifier.begin()
    assert not verifier.settles((), Excess())
