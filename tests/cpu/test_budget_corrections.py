# SPDX-License-Identifier: Apache-2.0
"""Decisions and their corrections, and what is left unused while a decision holds."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from offload_engine._budget.decide import _WASTED_SHARE, Decider, correct_if_shorter, excess_of
from offload_engine._budget.floor import FloorSteps
from offload_engine._budget.hold import HoldWatch
from offload_engine._budget.in_force import InForce
from offload_engine._budget.known import Known
from offload_engine._budget.stages import Stages
from offload_engine._budget.verify import Verifier
from offload_engine.planning.choices import Allowance, Choices, Slot
from offload_engine.planning.choose import choose
from offload_engine.planning.memory import Excess
from offload_engine.planning.predict import Costs, held_with
from offload_engine.planning.steps import Decision, Steps
from tests.cpu.test_choose import GIB, layer_options, one_rank


@pytest.mark.parametrize(
    ("num_chunks", "chunk_bytes", "expected"),
    [(4, 100.0, 7.0), (4, 102.0, 7.0), (4, 90.0, 9.0), (2, 100.0, 9.0)],
    ids=["alike", "other routing", "shorter sequences", "other microbatches"],
)
def test_the_shortest_of_the_steps_alike_counts(num_chunks: int, chunk_bytes: float, expected: float) -> None:
    floor = FloorSteps(None)
    floor.begin_state()
    for step in ((num_chunks, chunk_bytes, 7.0), (4, 100.0, 9.0)):
        floor.note_time(SimpleNamespace(**dict(zip(("num_chunks", "chunk_bytes", "milliseconds"), step, strict=True))))  # type: ignore[arg-type]
    assert floor.milliseconds == expected


WASTED = 2 * GIB
SHARES = 0.15, 0.5
WASTES = [
    ((0.4, 0.94), (3, 3)),  # it could not grow as much again
    ((1.16, 1.22), (3, 3)),  # it is over at once
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


# -- while a decision holds, window by window, on a decider that writes down what it is told --------------------------

BUDGET = 1 << 20
UNUSED = BUDGET // 32


def watch_of(peak_bytes: int, num_moves: int = 1, recomputed_bytes: int = 0) -> tuple[HoldWatch, Any, list[Excess]]:
    corrected: list[Excess] = []
    best = SimpleNamespace(held_bytes=BUDGET, num_moves=num_moves, recomputed_bytes=recomputed_bytes, decision=0)
    decider = mock.Mock(budget_bytes=BUDGET, extra_bytes=0, is_at_floor=False, chosen=SimpleNamespace(best=best))
    decider.agree, decider.correct = lambda numbers: numbers, corrected.append
    decider.known.note_excess = lambda prediction, actions, excess: excess
    decider.level.return_value, decider.decide.return_value = False, None
    last = mock.Mock(peak_bytes=peak_bytes, end_bytes=0)
    return HoldWatch(decider, mock.Mock(), last), last, corrected


@pytest.mark.parametrize(("num_moves", "recomputed_bytes"), [(1, 0), (0, 1), (0, 0)])
@pytest.mark.parametrize("unused", [UNUSED, UNUSED + 1])
def test_half_of_what_was_left_is_used_if_anything_moves(unused: int, num_moves: int, recomputed_bytes: int) -> None:
    watch, _, corrected = watch_of(BUDGET - unused, num_moves, recomputed_bytes)
    watch.use_what_is_left()
    is_used = unused > UNUSED and (num_moves > 0 or recomputed_bytes > 0)
    assert corrected == [Excess(-unused // 2)] * is_used


@pytest.mark.parametrize("is_other", [False, True])
def test_the_allocator_is_emptied_for_another_decision_only(is_other: bool) -> None:
    watch, _, _ = watch_of(BUDGET // 2)
    decider: Any = watch._decider
    other = SimpleNamespace(best=SimpleNamespace(decision=int(is_other)))
    decider.decide.side_effect = lambda **_: setattr(decider, "chosen", other)
    watch.use_what_is_left()
    assert watch._in_force.clear_allocator.call_count == is_other  # type: ignore[attr-defined]


@pytest.mark.parametrize(("num_excesses", "num_windows"), [(0, 1), (1, 2), (3, 8), (6, 64), (7, 64)])
def test_steps_above_the_budget_double_how_long_it_takes(num_excesses: int, num_windows: int) -> None:
    watch, last, corrected = watch_of(BUDGET + 1)
    for _ in range(num_excesses):
        watch.answer(BUDGET + 1, is_window_over=False)
    last.peak_bytes = BUDGET
    watch.use_what_is_left()  # nothing was left
    last.peak_bytes = BUDGET // 2
    for _ in range(2):
        corrected.clear()
        for _ in range(num_windows):
            assert not corrected
            watch.use_what_is_left()
        assert len(corrected) == 1


def test_a_plan_that_was_given_and_does_not_fit_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Where ranks have to agree it is measured when a window is over; every step until then was warned of."""
    watch, _, _ = watch_of(BUDGET + 1)
    watch._decider.chosen, watch._in_force.recomputed = None, frozenset()
    for _ in range(3):
        watch.answer(BUDGET + 1, is_window_over=False)
    assert watch.wants_measure and len(caplog.records) == 1


@pytest.mark.parametrize(("num_within", "is_kept"), [(1, False), (9, False), (10, True)])
def test_a_decision_that_soon_goes_over_the_budget_again_is_why(num_within: int, is_kept: bool) -> None:
    """An allocator that is emptied each time holds less in the next step, and more in the ones behind it."""
    watch, last, corrected = watch_of(BUDGET // 2)
    last.end_bytes, last.gauge.peak_bytes.return_value = BUDGET + 1, 0
    watch.answer(BUDGET + 1, is_window_over=False)
    for _ in range(num_within):
        watch.answer(BUDGET, is_window_over=False)
    assert not corrected
    watch.answer(BUDGET + 1, is_window_over=False)
    assert bool(corrected) != is_kept
    last.end_bytes = BUDGET  # an evaluation held more, after the step
    corrected.clear()
    watch.answer(BUDGET + 1, is_window_over=False)
    assert not corrected


# -- second thoughts --------------------------------------------------------------------------------------------------


def verified(share: float, *, at_floor: bool = False) -> tuple[Any, Verifier]:
    """Return a decider of a job that may recompute, in its decision or the lowest one, and its verifier.

    Args:
        share: of the bytes between everything offloaded and nothing, in the budget.
        at_floor: the floor is in force.
    """
    job, model = one_rank(more_bytes=0)
    known = Known(job, model, Costs(options=layer_options(job)))
    ends = known.choose(job.actions, 1 << 50)
    everything = held_with(model, Steps(job, Costs().link), Decision())
    budget = round(everything + share * (ends.top.held_bytes - everything))
    decider: Any = Decider(budget, None, None, is_early_certain=True)  # type: ignore[arg-type]
    decider.known = known
    decider.decide()
    if at_floor:
        decider.chosen = decider.chosen._replace(best=decider.chosen.floor)
    verifier = Verifier(decider)
    verifier.begin()
    return decider, verifier


def test_times_are_first_predicted_for_a_device_that_clocks_lower() -> None:
    """And from its own steps on for what they have shown, also if a step is measured once more."""
    decider, _ = verified(0.3)
    without = decider.chosen
    decider.expected_ratio = 1.05
    decider.know(decider.known, 0)
    decider.decide()
    first, most = decider.chosen, decider.chosen.most_busy_ratio
    assert first.busy_ratio == 1.05 < most
    assert first.best.decision == without.best.decision and first.best.step_ms > without.best.step_ms
    decider.correct_time((first.best.step_ms + without.best.step_ms) / 2)
    measured = decider.chosen.busy_ratio
    assert 1 < measured < first.busy_ratio and decider.known.costs.busy_ratio == measured
    decider.know(decider.known, 0)
    decider.known.costs = dataclasses.replace(decider.known.costs, busy_ratio=1.0)
    decider.decide()
    assert decider.chosen.busy_ratio == measured


def test_steps_that_verify_correct_times_only_if_they_are_shorter() -> None:
    """They reserve memory, or wait for a stage that does: one took a sixth longer than the steps behind it."""
    decider, _ = verified(0.3)
    first = decider.chosen
    correct_if_shorter(decider, 1.2 * first.step_ms)
    assert decider.chosen == first and decider.known.costs.busy_ratio == 1.0
    correct_if_shorter(decider, 0.95 * first.step_ms)
    assert decider.chosen.step_ms < first.step_ms


def test_another_decision_is_taken_once_if_corrected_times_show_it_to_be_faster() -> None:
    for slower, is_changed in ((1.01, False), (1.035, False), (1.05, True), (1.1, True)):
        decider, verifier = verified(0.3)
        first = decider.chosen.best
        decider.chosen = decider.chosen._replace(best=first._replace(step_ms=slower * first.step_ms))
        assert (verifier.reconsider() is not None) == is_changed
        decider.chosen = decider.chosen._replace(best=first._replace(step_ms=2 * first.step_ms))
        assert verifier.reconsider() is None


def test_no_other_decision_is_taken_if_other_stages_make_the_step_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be verified in two more steps, and save nothing."""
    for own_share, is_changed in ((0.0, False), (1.0, True)):
        decider, verifier = verified(0.3)
        first = decider.chosen.best
        slow_ms = 1.1 * first.step_ms

        def timed(chosen: Any, work: object, own: float = own_share, longest_ms: float = slow_ms) -> Any:
            return chosen._replace(pipeline_ms=own * chosen.best.step_ms + (1 - own) * longest_ms)

        monkeypatch.setattr(decider.stages, "timed", timed)
        decider.chosen = timed(decider.chosen._replace(best=first._replace(step_ms=slow_ms)), None)
        assert (verifier.reconsider() is not None) == is_changed


def test_in_a_pipeline_no_decision_with_a_larger_arena_replaces_another_for_its_time() -> None:
    for is_pipeline, arena_bytes, is_changed in ((True, 64, False), (True, 128, True), (False, 64, True)):
        decider, verifier = verified(0.3)
        decider.stages, first = Stages(0, 1 + is_pipeline), decider.chosen.best
        decider.known._steps_of(decider.actions).arena_bytes[first.decision] = 128
        slow = first._replace(step_ms=1.1 * first.step_ms, arena_bytes=arena_bytes)
        decider.chosen = decider.chosen._replace(best=slow)
        assert (verifier.reconsider() is not None) == is_changed


@pytest.mark.parametrize("refuses", [False, True])
def test_no_decision_is_replaced_on_one_rank_alone(refuses: bool) -> None:
    """Another one may have a smaller arena, or have corrected its model alone."""
    decider, verifier = verified(0.3)
    decider.stages, first = Stages(0, 2), decider.chosen.best
    decider.agree = lambda numbers: (int(refuses),) if len(numbers) == 1 else numbers
    decider.chosen = decider.chosen._replace(best=first._replace(step_ms=1.1 * first.step_ms))
    assert (verifier.reconsider() is None) == refuses
    decider, verifier = verified(0.3)
    decider.agree = lambda numbers: tuple(number + (len(numbers) == 2) for number in numbers)
    decider.chosen = decider.chosen._replace(best=first._replace(step_ms=1.1 * first.step_ms))
    assert verifier.reconsider() is None, "they know other things"


@pytest.mark.parametrize(
    ("ratio", "are_several", "is_changed"), [(0.7, True, False), (0.8, True, True), (0.7, False, True)]
)
def test_times_that_clocks_do_not_explain_make_no_other_decision(
    ratio: float, are_several: bool, is_changed: bool
) -> None:
    """Experts shared their tokens otherwise in the measured step. Nor do they concern the next measured step."""
    decider, verifier = verified(0.3)
    first = decider.chosen.best
    decider.agree = (lambda numbers: numbers) if are_several else tuple
    decider.chosen = decider.chosen._replace(best=first._replace(step_ms=1.1 * first.step_ms), busy_ratio=ratio)
    assert (verifier.reconsider() is not None) == is_changed
    decider._busy_ratio, decider.expected_ratio = ratio, 1.05
    decider.know(decider.known, 0)
    decider.decide()
    assert decider.chosen.busy_ratio == (ratio if is_changed else 1.05)


def test_what_a_replayed_decision_reserves_in_vain_is_not_held_against_others() -> None:
    for is_replayed in (True, False):
        decider, verifier = verified(0.3)
        over = decider.budget_bytes - decider.chosen.best.held_bytes + 1
        first, model = decider.chosen.best, decider.known.model
        if is_replayed:
            decider.known._steps_of(decider.actions).wasted_bytes[first.decision] = 0
        assert verifier.judge(Excess(0, over)) is not None
        assert decider.chosen.best.decision != first.decision
        assert decider.known.model.overhead_bytes == model.overhead_bytes + (0 if is_replayed else over)


def test_a_floor_that_recomputes_and_reserves_too_much_gives_way_to_what_was_measured() -> None:
    decider, verifier = verified(0.01, at_floor=True)
    floor, over = decider.chosen.best, decider.budget_bytes - decider.chosen.best.held_bytes + 1
    assert floor.recomputed_bytes and verifier.judge(Excess(over, 0)) is None, "less is not possible"
    decider, verifier = verified(0.01, at_floor=True)
    allowance = verifier.judge(Excess(0, over + 4 * GIB))
    assert allowance is not None and decider.chosen.best.decision != floor.decision
    assert decider.chosen.best.held_bytes <= decider.budget_bytes


# -- a decision that recomputes something else ------------------------------------------------------------------------


def test_the_first_step_that_recomputes_something_else_keeps_nothing() -> None:
    """No plan knows its groups: those that leave without one would come back earlier, beside those that stay."""
    slot, other = Slot(0, 0, "kept", 0), Slot(0, 0, "recomputed", 0)
    keeping, decider = mock.Mock(), mock.Mock()
    in_force = InForce(decider, keeping, mock.Mock())
    whole = Allowance(Choices(frozenset([slot]), frozenset([other])), {slot: 8}, resident_bytes=8)
    in_force.allow(whole)
    assert decider.apply.call_args == mock.call(whole.choices)
    assert keeping.allow.call_args_list == [mock.call(Allowance(Choices(recomputed=frozenset([other]))))]
    assert (in_force.is_settled, in_force.settle()) == (False, False)
    assert keeping.allow.call_args == mock.call(whole)
    keeping.allow.reset_mock()
    assert in_force.settle() and not keeping.allow.called
    in_force.allow(whole)
    assert keeping.allow.call_args_list == [mock.call(whole)], "it recomputes the same"
