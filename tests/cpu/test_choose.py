# SPDX-License-Identifier: Apache-2.0
"""The model of memory and the choice; and an engine on the simulator's clocks, which does what is predicted."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch

from offload_engine import ChunkKey, GroupTraits, OffloadConfig, OffloadEngine, Planned
from offload_engine._budget.decide import Decider
from offload_engine._budget.first import decide_first
from offload_engine._budget.known import Known
from offload_engine._budget.state import State
from offload_engine._policy.keeping import Keeping
from offload_engine._policy.leaving import LeavingQueue
from offload_engine._policy.policy import Policy
from offload_engine._saved.counters import ByteCounters
from offload_engine._saved.storage import TensorGroup
from offload_engine.errors import BudgetError
from offload_engine.planning.by_name import kept_beside_names
from offload_engine.planning.choices import Allowance, Choice, Choices, Slot, slots_of
from offload_engine.planning.choose import Chosen, choose, completed, retimed
from offload_engine.planning.clocks import Link
from offload_engine.planning.memory import Excess, Job, MeasuredBoundary, MeasuredMemory, MemoryModel, make_memory_model
from offload_engine.planning.moves import CHUNK_BACKWARD
from offload_engine.planning.other_bytes import OtherBytes
from offload_engine.planning.plan import validate_plan
from offload_engine.planning.planner import plan_step
from offload_engine.planning.predict import Costs, Prediction, Predictor, measured_busy_ratio, with_busy_ratio
from offload_engine.planning.recompute import RecomputeOption, evenly, first_layers, with_recomputation
from offload_engine.planning.residents import Residents
from offload_engine.planning.saved_plan import parse_saved
from offload_engine.planning.shapes import GroupShape
from offload_engine.planning.shortened import shortened
from offload_engine.planning.simulate import PipelineJob, RankJob, simulate
from offload_engine.planning.steps import Decision, Outcome, Steps
from offload_engine.planning.worth import peak_costs
from offload_engine.schedule import count_alive, interleaved, no_pipelining, one_forward_one_backward
from tests.dense_jobs import ALL, ATTENTION, DEEP, MIB, MOST, ONE_RANK, dense_job, simulate_planned, with_bounds
from tests.engine_on_clocks import SCALE, ClockDevice, EngineRank, _run_rank, run_engine
from tests.lookups import present
from tests.meeting import Meeting

GIB = 1 << 30
JOBS = {"all names": dense_job(ALL), "five names": dense_job(MOST), "four ranks": DEEP, "one rank": ONE_RANK}
each_job = pytest.mark.parametrize("name", JOBS)
COSTS = Costs()


def job_named(name: str) -> Job:
    rank = JOBS[name].ranks[0]
    return Job(rank.actions, rank.shapes, rank.bounds)


def flat_model(job: Job, more_bytes: int = GIB // 2) -> MemoryModel:
    """All else takes 6 GiB, but `more_bytes` where the backward of a chunk begins."""
    residents = job.residents(Choices()).before
    more = {boundary: more_bytes if boundary.kind is CHUNK_BACKWARD else 0 for boundary in residents}
    measured = [MeasuredBoundary(b, n + 5 * GIB + more[b], n) for b, n in residents.items()]
    return make_memory_model(job, MeasuredMemory(tuple(measured), 0, GIB), is_early_certain=True)


def held_bytes(model: MemoryModel, job: Job, choices: Choices) -> int:
    return model.held_with(job.residents(choices), model.early_share(job, choices))


@cache
def one_rank(more_bytes: int = GIB // 2) -> tuple[Job, MemoryModel]:
    job = job_named("one rank")
    return job, flat_model(job, more_bytes)


def decider_of(job: Job, model: MemoryModel, budget: int, costs: Costs = COSTS) -> Decider:
    decider = Decider(budget, None, None, is_early_certain=True)  # type: ignore[arg-type]
    decider.known = Known(job, model, costs)
    decider.decide(job.actions)
    return decider


def curve_of(chosen: Chosen, job: Job, costs: Costs) -> tuple[Prediction, ...]:
    return Known(job, flat_model(job), costs).curve(chosen, job.actions)


@cache
def ends(name: str) -> tuple[Prediction, Prediction]:
    """Everything offloaded, and nothing."""
    chosen = chosen_for(name, 1 << 50)
    return chosen.floor, chosen.top


@cache
def chosen_for(name: str, budget_bytes: int) -> Chosen:
    job = job_named(name)
    return choose(job, flat_model(job), budget_bytes, COSTS)


def budgets(name: str, count: int = 6) -> list[int]:
    floor, top = ends(name)
    return [floor.held_bytes + (top.held_bytes - floor.held_bytes) * i // (count - 1) for i in range(count)]


# -- the choice -------------------------------------------------------------------------------------------------------


@each_job
def test_every_budget_holds_and_more_memory_takes_no_longer(name: str) -> None:
    floor, top = ends(name)
    before = floor.step_ms
    for budget in (budgets(name)[number] for number in (0, 2, 5)):
        best = chosen_for(name, budget).best
        assert best.held_bytes <= budget
        assert top.step_ms <= best.step_ms <= 1.001 * before
        before = best.step_ms
    assert best == top and best.num_moves == 0
    curve = curve_of(chosen_for(name, budgets(name)[2]), job_named(name), COSTS)
    assert curve[0].held_bytes <= floor.held_bytes and curve[-1].step_ms == top.step_ms
    sizes, times = [each.held_bytes for each in curve], [each.step_ms for each in curve]
    assert sizes == sorted(sizes) and times == sorted(times, reverse=True)


@pytest.mark.parametrize("share", [0.2, 0.4, 0.6, 0.8])
def test_of_names_whose_groups_leave_those_are_found_that_move_least(share: float) -> None:
    job, model = one_rank()
    predictor, [floor, top] = Predictor(job, model, COSTS), ends("one rank")
    limit = round(floor.held_bytes + share * (top.held_bytes - floor.held_bytes))

    def moved_bytes(kept: frozenset[Slot]) -> int:
        return sum(predictor.predict(Decision(Choices(kept))).moved_bytes.values())

    kept = present(kept_beside_names(predictor, limit, peak_costs(predictor), frozenset()))
    assert predictor.held_bytes(Decision(Choices(kept))) <= limit
    names = {slot.name for slot in predictor.nbytes}
    assert {slot.name for slot in kept}.isdisjoint({slot.name for slot in predictor.nbytes if slot not in kept})
    subsets = (leaving for num in range(len(names) + 1) for leaving in combinations(sorted(names), num))
    others = [frozenset(slot for slot in predictor.nbytes if slot.name not in leaving) for leaving in subsets]
    fitting = [each for each in others if predictor.held_bytes(Decision(Choices(each))) <= limit]
    assert moved_bytes(kept) == min(map(moved_bytes, fitting))
    some = frozenset(slot for slot in predictor.nbytes if slot.layer == 0)
    beside = kept_beside_names(predictor, limit, peak_costs(predictor), some)
    assert beside is None or some.isdisjoint(beside)
    assert kept_beside_names(predictor, 0, peak_costs(predictor), frozenset()) is None


def test_a_budget_below_the_floor_says_by_how_much() -> None:
    floor, _ = ends("all names")
    with pytest.raises(BudgetError, match=r"is 4.00 GiB, 4.06 GiB less than the 8.06 GiB of a step .* 6.12 GiB are w"):
        chosen_for("all names", 4 * GIB)
    job = job_named("all names")
    chosen = choose(job, flat_model(job), 4 * GIB, COSTS, must_fit=False)
    assert chosen.best is chosen.floor and chosen.floor == floor


def test_compute_is_slower_the_less_it_waits() -> None:
    (job, model), budget = one_rank(), budgets("one rank")[2]
    plain = choose(job, model, budget, COSTS)
    slower = choose(job, model, budget, dataclasses.replace(COSTS, busy_ratio=1.2))
    assert slower.floor.step_ms == plain.floor.step_ms and plain.top.stalled_ms == 0.0
    assert slower.top.step_ms == pytest.approx(1.2 * plain.top.step_ms)
    assert plain.best.step_ms < slower.best.step_ms < 1.2 * plain.best.step_ms
    again = retimed(completed(plain, Predictor(job, model, COSTS)), 1.2)
    retimed_ms, slower_ms = ([each.step_ms for each in curve_of(found, job, COSTS)] for found in (again, slower))
    assert retimed_ms == pytest.approx(slower_ms)
    assert again.best.step_ms == pytest.approx(slower.best.step_ms) and again.floor == plain.floor
    # A step with other microbatches is predicted by the floor's time and the ratio of those that were measured.
    floor_ms = plain.floor.step_ms / 2
    shorter = choose(job, model, budget, dataclasses.replace(COSTS, floor_ms=floor_ms, busy_ratio=1.1))
    assert shorter.best.num_moves < shorter.floor.num_moves
    assert retimed(shorter, 1.2).best.step_ms == pytest.approx(shorter.floor.step_ms)


@pytest.mark.parametrize("ratio", [1.06, 1.12])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_slower_compute_hides_more_of_the_copies(number: int, ratio: float) -> None:
    """A step that waited a little was thought to take 4% longer than it did, and a slower one was chosen."""
    (job, model), budget = one_rank(), budgets("one rank")[number]
    known = Known(job, model, COSTS)
    best = known.choose(job.actions, budget).best
    assert best.stalled_ms > 0 and best.hidden_ms > 0
    simulated = known._steps[job.actions]._outcomes
    assert [decision for decision, slower in simulated if slower != 1.0] == [best.decision]  # and no other candidate
    slower = 1 + (ratio - 1) * best.busy
    expected_ms = Steps(scaled(job, slower), Link()).outcome(best.decision).milliseconds
    found = with_busy_ratio(best, 1.0, ratio)
    off_ms, off_without = (abs(each - expected_ms) for each in (found.step_ms, slower * best.step_ms))
    assert off_ms < min(0.01 * expected_ms, 0.6 * off_without)
    assert with_busy_ratio(found, ratio, 1.0).step_ms == pytest.approx(best.step_ms)
    assert measured_busy_ratio(best, 1.0, found.step_ms, 2.0) == pytest.approx(ratio, rel=1e-4)


def scaled(job: Job, slower: float) -> Job:
    """Return the job with compute that takes so many times as long."""

    def times(found: Any) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(found) if field.name.endswith("_ms")]
        return {name: slower * getattr(found, name) for name in names}

    shapes = [
        dataclasses.replace(
            shape, groups=tuple(dataclasses.replace(group, **times(group)) for group in shape.groups), **times(shape)
        )
        for shape in job.shapes
    ]
    return dataclasses.replace(job, shapes=tuple(shapes))


@pytest.mark.parametrize("name", ["one rank", "all names", "five names"])
def test_the_time_of_a_step_corrects_all_predictions_but_the_floor_which_stays_the_longest(name: str) -> None:
    job, budget = job_named(name), budgets(name)[2]
    model = flat_model(job)
    decider = decider_of(job, model, budget)
    before = present(decider.chosen)
    for ratio in (1.1, 1.0):
        decider.correct_time(ratio * before.best.step_ms)
        after = present(decider.chosen)
        assert after.best.decision == before.best.decision and after.floor == before.floor
        assert after.best.step_ms == pytest.approx(min(ratio * before.best.step_ms, before.floor.step_ms))
    assert decider.chosen in decider._decisions.values()
    decider.correct_time(10 * before.best.step_ms)  # it was held up: no clock does that
    again = choose(job, model, budget, dataclasses.replace(COSTS, busy_ratio=present(decider.chosen).busy_ratio))
    assert again.best.step_ms <= present(decider.chosen).best.step_ms, "other decisions may hide more copies now"
    assert present(decider.chosen).best.decision == before.best.decision
    for found in (present(decider.chosen), again):
        assert found.busy_ratio > 1
        assert before.best.step_ms < found.best.step_ms < found.floor.step_ms == before.floor.step_ms
        curve = curve_of(found, job, COSTS)
        assert all(each.step_ms < found.floor.step_ms for each in curve if each.busy and each != found.floor)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0], ids=lambda share: f"{share:.0%} of the waits are real")
@pytest.mark.parametrize("rest", [0.0, 0.2], ids=lambda rest: f"{rest:.0%} of compute are not simulated")
def test_the_measured_time_of_a_step_is_not_that_of_one_with_other_microbatches(share: float, rest: float) -> None:
    """Else a step with half as many would be predicted to take as long, and its waits not to exist, or to be longer."""
    job, model = one_rank()
    shorter = dataclasses.replace(job, actions=tuple(no_pipelining(2)))
    floors = [Steps(each, Link()).outcome(Decision()) for each in (job, shorter)]
    measured_ms, expected_ms = (
        each.busy_ms + share * each.stalled_ms + (rest * each.busy_ms if share == 1.0 else 0.0) for each in floors
    )
    decider = decider_of(job, model, 1 << 50, Costs(floor_ms=measured_ms))
    for actions, floor_ms in ((job.actions, measured_ms), (shorter.actions, expected_ms)):
        decider.decide(actions)
        assert present(decider.chosen).floor.step_ms == pytest.approx(floor_ms)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_floor_that_was_held_up_is_found_out_by_the_step_that_verifies(number: int) -> None:
    """Also where both steps that are timed were held up; and no step is predicted to take less than it can."""
    (job, model), budget = one_rank(), budgets("one rank")[number]
    held_up_ms = 2 * Steps(job, Link()).outcome(Decision()).milliseconds
    decider, true = decider_of(job, model, budget, Costs(floor_ms=held_up_ms)), choose(job, model, budget, COSTS)
    decider.correct_time(true.best.step_ms)
    found, truth = present(decider.chosen), {each.decision: each.step_ms for each in curve_of(true, job, COSTS)}
    assert found.best.step_ms == pytest.approx(true.best.step_ms) and found.busy_ratio == pytest.approx(1.0, abs=0.01)
    for each in (*present(decider.known).curve(found, job.actions), found.floor):
        assert each.step_ms == pytest.approx(truth.get(each.decision, each.step_ms), rel=0.01)


@each_job
def test_steps_are_as_planned_and_simulated_one_by_one(name: str) -> None:
    """What is known of all decisions is not found anew for each: the plans, bytes and times are the same."""
    job, link = job_named(name), Link()
    recomputable = options(job, "core_attn", 2.0)
    steps = Steps(job, link, recomputable)
    slots, host_bytes = slots_of(0, job.shapes[0].groups), 0
    for choices in (Choices(), Choices(frozenset(slots[::3])), Choices(recomputed=recomputable[0].replaces)):
        for room in (None, 2 * GIB, 4 * GIB):
            decision = Decision(choices, room)
            own = [option for option in recomputable if option.replaces <= choices.recomputed]
            alone = dataclasses.replace(job, shapes=with_recomputation(job.shapes, own)).within(room)
            plan = plan_step(alone.actions, alone.shapes, alone.bounds, choices=choices)
            planned = steps.planned(decision)
            assert (planned.job, planned.plan) == (alone, plan)
            assert dataclasses.astuple(planned.residents) == dataclasses.astuple(alone.residents(choices))
            rank = RankJob(alone.actions, alone.shapes, alone.bounds)
            [outcome] = simulate(PipelineJob((rank,), link), [plan], peak_host_bytes=host_bytes).ranks
            assert steps.outcome(decision) == Outcome(outcome.milliseconds, outcome.stalls, outcome.of_actions)
            host_bytes = host_bytes or outcome.counters.peak_host_bytes  # as the step with all offloaded has lent


def test_a_curve_has_a_decision_in_each_part_of_the_way_though_few_were_tried() -> None:
    """Where all fits, no decision is tried that recomputes."""
    job, model = one_rank()
    costs = Costs(options=options(job, "core_attn", 2.0))
    found = choose(job, model, 1 << 50, costs)
    curve, ways = curve_of(found, job, costs), range(8)
    sizes = [found.floor.held_bytes + (found.top.held_bytes - found.floor.held_bytes) * part // 8 for part in ways]
    for size, budget in pairwise(sizes):
        assert min(each.step_ms for each in curve if each.held_bytes <= budget) <= 1.001 * (
            choose(job, model, size, costs).best.step_ms
        )


# -- recomputation ----------------------------------------------------------------------------------------------------


def options(job: Job, name: str, milliseconds: float) -> tuple[RecomputeOption, ...]:
    found = []
    for stage, shape in enumerate(job.shapes):
        for slot, group in zip(slots_of(stage, shape.groups), shape.groups, strict=True):
            if slot.name == name:
                found.append(RecomputeOption(name, frozenset({slot}), group.nbytes, milliseconds))
    return tuple(found)


def test_what_is_cheap_to_recompute_is_recomputed_where_the_link_is_behind() -> None:
    (job, model), budget = one_rank(), budgets("one rank")[1]
    plain = chosen_for("one rank", budget)
    cheap = choose(job, model, budget, Costs(options=options(job, "mlp_act", 0.5)))
    assert cheap.best.recomputed_bytes and set(cheap.best.recomputed_bytes) == {"mlp_act"}
    assert cheap.best.held_bytes <= budget and cheap.best.step_ms < 0.9 * plain.best.step_ms
    dear = choose(job, model, budget, Costs(options=options(job, "mlp_act", 50.0)))
    assert dear.best == plain.best
    fitting = choose(job, model, 1 << 50, Costs(options=options(job, "mlp_act", 0.5)))
    assert not fitting.best.recomputed_bytes


def layer_options(job: Job, milliseconds: float = 1.0) -> tuple[RecomputeOption, ...]:
    """Each layer, of which an input of 64 MiB is saved still."""
    found: defaultdict[int, dict[Slot, int]] = defaultdict(dict)
    for slot, group in zip(slots_of(0, job.shapes[0].groups), job.shapes[0].groups, strict=True):
        found[slot.layer][slot] = group.nbytes
    return tuple(
        RecomputeOption("layer", frozenset(sizes), sum(sizes.values()) - 64 * MIB, milliseconds, False)
        for sizes in found.values()
    )


def test_a_budget_below_the_floor_of_offload_is_reached_by_recomputing() -> None:
    job, model = one_rank(more_bytes=0)
    plain, costs = choose(job, model, 1 << 50, COSTS), Costs(options=layer_options(job))
    budget = plain.floor.held_bytes - 256 * MIB
    with pytest.raises(BudgetError):
        choose(job, model, budget, COSTS)
    chosen = choose(job, model, budget, costs)
    assert chosen.best.held_bytes <= budget and chosen.best.recomputed_bytes
    assert chosen.floor.held_bytes < plain.floor.held_bytes and chosen.floor.held_bytes <= chosen.best.held_bytes
    with pytest.raises(BudgetError, match="with everything offloaded, and recomputed where possible"):
        choose(job, model, chosen.floor.held_bytes - 1, costs)
    assert choose(job, model, 4 * GIB, costs, must_fit=False).best == chosen.floor


def test_what_is_recomputed_is_spread_over_the_layers_and_cheap_names_come_first() -> None:
    slots = [Slot(0, layer, "layer", 0) for layer in range(8)]
    cheap, dear = ([RecomputeOption(n, frozenset({s}), 100, ms) for s in slots] for n, ms in (("a", 1.0), ("b", 2.0)))

    def layers(share: float) -> list[tuple[str, int]]:
        return [(each.name, min(each.replaces).layer) for each in evenly([*dear, *cheap], share)]

    assert layers(0.25) == [("a", 0), ("a", 2), ("a", 4), ("a", 6)] and layers(0.001) == [("a", 0)]
    assert layers(0.625) == [("a", layer) for layer in range(8)] + [("b", 0), ("b", 4)]
    assert len(layers(1.0)) == 16
    of_first = first_layers([*cheap, *dear[::-1]], 0.25)
    assert sorted(of_first, key=lambda each: each.name) == [cheap[0], cheap[1], dear[0], dear[1]]


def test_the_first_layers_are_recomputed_where_that_takes_less_memory() -> None:
    """What the last layers free comes back when the backward begins."""
    job, model = one_rank(more_bytes=0)
    costs = Costs(options=tuple(dataclasses.replace(each, comes_back=True) for each in layer_options(job)))
    ends = choose(job, model, 1 << 50, costs)
    budget = ends.floor.held_bytes + (ends.top.held_bytes - ends.floor.held_bytes) * 2 // 5
    found = choose(job, model, budget, costs).best.decision.choices.recomputed
    assert {slot.layer for slot in found} == {0, 1, 2, 3}


# -- the model of memory ----------------------------------------------------------------------------------------------


def test_the_measured_step_is_predicted_exactly() -> None:
    job = job_named("all names")
    residents = job.residents(Choices()).before
    measured = tuple(MeasuredBoundary(b, n + 7 * i, n - 3 * (n > 3)) for i, (b, n) in enumerate(residents.items()))
    for is_certain in (True, False):
        model = make_memory_model(job, MeasuredMemory(measured, 0, 11), is_early_certain=is_certain)
        expected = max(each.peak_bytes for each in measured) + 11
        assert held_bytes(model, job, Choices()) == expected + (0 if is_certain else 3)


def test_bytes_leave_the_peak_one_for_one() -> None:
    job, model = one_rank(more_bytes=0)
    everything = Choices(frozenset(slots_of(0, job.shapes[0].groups)))
    grown = held_bytes(model, job, everything) - held_bytes(model, job, Choices())
    most, least = (max(job.residents(choices).before.values()) for choices in (everything, Choices()))
    assert grown == most - least
    corrected = model.corrected(Excess(5)).corrected(Excess(0, -2))
    assert held_bytes(corrected, job, everything) == held_bytes(model, job, everything) + 3
    between = dataclasses.replace(model, between_bytes=100 * GIB)  # between steps
    assert held_bytes(between, job, Choices()) == 101 * GIB
    longer = dataclasses.replace(job, actions=tuple(no_pipelining(9)))
    assert held_bytes(model, longer, Choices()) == held_bytes(model, job, Choices())


def test_a_correction_downwards_says_nothing_of_what_does_not_leave() -> None:
    """It is found where copies complete early: a step in which nothing moves holds all that it saves."""
    job, model = one_rank()
    everything = Choices(frozenset(slots_of(0, job.shapes[0].groups)))
    early = model.corrected(Excess(-GIB))
    assert held_bytes(early, job, everything) == held_bytes(model, job, everything)
    assert held_bytes(early, job, Choices()) == held_bytes(model, job, Choices()) - GIB
    predictor = Predictor(job, early, COSTS)
    with_room = Decision(resident_bytes=job.residents(everything).most * 2)
    for decision in (Decision(everything), with_room):
        assert predictor.predict(decision).held_bytes == held_bytes(model, job, everything)


def test_where_several_chunks_wait_and_nothing_moves_more_is_reserved_in_vain() -> None:
    """A fifth of what is allocated beyond the floor, between three quarters and twice what the floor reserved so."""
    job, model = one_rank()
    everything = Choices(frozenset(slots_of(0, job.shapes[0].groups)))
    own = held_bytes(model, job, everything)
    beyond = own - model.overhead_bytes - model.floor_peak_bytes
    for wasted, expected in ((beyond, 0.75 * beyond), (beyond // 5, beyond / 5), (beyond // 20, beyond / 10), (0, 0)):
        several = dataclasses.replace(model, wasted_bytes=wasted, is_pipeline=True)
        assert held_bytes(several, job, everything) + wasted - own == pytest.approx(expected, abs=2)


def test_what_is_measured_when_a_boundary_comes_again_goes_to_the_next() -> None:
    """The head of a model is reported behind the logits and behind the loss, and copy-outs are released between."""
    job, _ = one_rank()
    (first, of_first), (second, of_second) = list(job.residents(Choices()).before.items())[8:10]
    measured = [MeasuredBoundary(first, of_first + 5, of_first), MeasuredBoundary(first, 90, 20)]
    model = make_memory_model(
        job, MeasuredMemory((*measured, MeasuredBoundary(second, of_second, of_second)), 0, 0), is_early_certain=True
    )
    assert model.others.before[first] == 5 and model.others.before[second] == 70


def test_a_peak_is_of_its_residents_and_of_the_early_releases_that_recur() -> None:
    """Peaks that were asked for before are kept: each of its step, its share, and all else that is on the device."""
    job, _ = one_rank()
    residents = job.residents(Choices())
    most_at = max(residents.before, key=lambda at: residents.before[at])
    most = residents.before[most_at]
    others: Any = dict.fromkeys(residents.before, 100)
    found = OtherBytes(others, {most_at: 40}), OtherBytes(others, dict.fromkeys(others, 60))
    for _ in range(2):
        assert [each.peak(residents, 0.0) for each in found] == [most + 100] * 2
        assert found[1].peak(residents, 0.5) == most + 70
        assert found[0].peak(Residents({most_at: 7}, 7, 7), 0.5) == 87


# -- the whole budget on the simulator's clocks -----------------------------------------------------------------------

LEAST_BYTES, MOST_BYTES = 1985 * MIB // SCALE, 9480 * MIB // SCALE
"""Of the resident bytes of `ONE_RANK`, in bytes of the engine."""


class BudgetRank(EngineRank):
    """A rank with a budget; its clocks run on from step to step, and the host begins each with the device."""

    def __init__(self, job: RankJob, budget: int) -> None:
        super().__init__(job, ONE_RANK.link)
        self.engine.close()
        self.engine = OffloadEngine(OffloadConfig(min_tensor_bytes=1, gpu_budget=budget), self.device)
        self.engine.pool._slab_bytes //= SCALE
        controller = present(self.engine.budget)
        self.controller = controller
        self.controller._floor.optimizers._has_stepped.set()

    def begin_step(self) -> None:
        clocks = self.device.clocks.now
        clocks.host = clocks.compute = max(clocks.host, clocks.compute, *self.device.clocks.copied.values())
        self.engine.pool.reset()
        self.engine.begin_iteration(self.job.actions)

    def step(self) -> float:
        """Run a step; return its milliseconds."""
        running = _run_rank(self, 0, 1, 0, {})
        for _ in running:
            raise AssertionError("it waits for itself")
        self.engine.end_iteration()
        return self.device.clocks.now.compute


@pytest.mark.parametrize("share", [0.01, 0.2, 0.4, 0.6, 0.8, 1.01])
def test_time_and_memory_are_as_predicted(share: float) -> None:
    [job] = ONE_RANK.ranks
    rank = BudgetRank(job, round(LEAST_BYTES + share * (MOST_BYTES - LEAST_BYTES)))
    while rank.controller.state is not State.HOLD:
        rank.step()
        assert rank.controller._num_steps < 9
    rank.step()
    summary = present(rank.controller.summary)
    assert summary.measured_step_ms == pytest.approx(summary.predicted_step_ms, rel=0.01)
    assert rank.engine.stats.peak_resident_bytes <= summary.predicted_peak_bytes <= summary.budget_bytes
    assert summary.predicted_step_ms <= summary.lowest_step_ms
    link = present(rank.controller.decider.known).costs.link
    assert (link.out_gbps * SCALE, link.in_gbps * SCALE) == pytest.approx((50.0, 48.0), rel=0.01)
    rank.engine.close()


@pytest.mark.parametrize("slow", [1, 2], ids=["the step before", "the measured step"])
def test_one_slow_step_of_those_that_are_timed_changes_no_prediction(slow: int) -> None:
    """A budget of experts was predicted to take 30% longer than it did, by the one step that was timed."""
    [job] = ONE_RANK.ranks
    budget = round(LEAST_BYTES + 0.2 * (MOST_BYTES - LEAST_BYTES))
    predicted = list[list[float]]()
    for slow_ms in (0.0, 500.0):
        rank = BudgetRank(job, budget)
        while rank.controller.decider.chosen is None:
            rank.step()
            if rank.controller._num_steps == slow + 1:
                rank.device.compute(slow_ms)  # behind the last backward
                rank.controller._last._end_mark = rank.device.mark_time("compute")
        predicted.append([step_ms for _, step_ms in rank.controller.curve])
        rank.engine.close()
    plain_ms, slowed_ms = predicted
    assert slowed_ms == pytest.approx(plain_ms) and len(plain_ms) > 2


# -- choices: what is kept does not move in any microbatch, with or without a plan; what is no plan is refused --------


UP, DOWN = Slot(0, 0, "up", 0), Slot(0, 0, "down", 0)


def test_slots_count_the_groups_of_one_name_in_one_layer_and_each_has_a_choice() -> None:
    groups = [GroupShape("a", 0), GroupShape("b", 0), GroupShape("a", 0), GroupShape("a", 1)]
    assert slots_of(2, groups) == [Slot(2, 0, "a", 0), Slot(2, 0, "b", 0), Slot(2, 0, "a", 1), Slot(2, 1, "a", 0)]
    choices = Choices(frozenset({UP}), frozenset({DOWN}))
    found = [choices.of(slot) for slot in (UP, DOWN, Slot(0, 1, "up", 0))]
    assert found == [Choice.KEEP, Choice.RECOMPUTE, Choice.OFFLOAD] and choices and not Choices()
    with pytest.raises(ValueError, match="stage 0, layer 0, up, part 0 is kept and recomputed: choose one"):
        Choices(frozenset({UP}), frozenset({UP}))


@pytest.mark.parametrize("job", [dense_job(ALL), dense_job(ATTENTION, virtual=4), DEEP, ONE_RANK])
def test_what_is_kept_has_no_move_in_any_microbatch(job: PipelineJob) -> None:
    for rank in job.ranks:
        slots = [slots_of(stage, shape.groups) for stage, shape in enumerate(rank.shapes)]
        every = [slot for of_stage in slots for slot in of_stage]
        choices = Choices(frozenset(every[::3]))
        plan, without = plan_step(rank.actions, rank.shapes, choices=choices), plan_step(rank.actions, rank.shapes)
        validate_plan(plan, rank.actions, rank.shapes)
        moved, could = ({slots[g.chunk.stage][g.index] for _, (_, g) in each.moves()} for each in (plan, without))
        assert moved == could - choices.kept
        assert plan_step(rank.actions, rank.shapes, choices=Choices()) == without
        assert list(plan_step(rank.actions, rank.shapes, choices=Choices(frozenset(every))).moves()) == []


def test_of_what_is_recomputed_only_what_is_still_saved_moves() -> None:
    [rank] = ONE_RANK.ranks
    slots = slots_of(0, rank.shapes[0].groups)
    mlp = frozenset(slots[3:5])  # mlp_fc1 has 128, mlp_act 448 MiB
    shapes = with_recomputation(rank.shapes, [RecomputeOption("mlp", mlp, 500 * MIB, 3.0)])
    before, after = (each[0].groups[3:5] for each in (rank.shapes, shapes))
    assert [group.nbytes // MIB for group in after] == [76, 0]
    assert [a.backward_ms - b.backward_ms for a, b in zip(after, before, strict=True)] == [0, 3]
    plan = plan_step(rank.actions, shapes, choices=Choices(recomputed=mlp))
    without = plan_step(rank.actions, rank.shapes)
    moved, could = ({slots[g.index] for _, (_, g) in each.moves()} for each in (plan, without))
    assert slots[3] in moved and moved == could - {slots[4]}
    assert [group.recomputed_bytes // MIB for group in after] == [52, 448]
    # An output is there to the end of the first group's backward.
    for comes_back, expected in ((True, [116, 448]), (False, [64, 0])):
        option = RecomputeOption("mlp", mlp, 500 * MIB, 3.0, comes_back, output_bytes=64 * MIB)
        [shape] = with_recomputation(rank.shapes, [option])
        assert [group.recomputed_bytes // MIB for group in shape.groups[3:5]] == expected
    with pytest.raises(ValueError, match="it must replace a group"):
        RecomputeOption("mlp", frozenset(), 1, 1.0)


@pytest.mark.parametrize(
    ("name", "is_kept", "more_bytes", "more_resident", "expected"),
    [
        ("up", False, 0, 0, "stays"),
        ("up", False, 1, 0, "leaves"),
        ("up", False, 0, 1, "leaves"),
        ("up", True, 1, 0, "as its traits say"),
        ("down", False, 0, 0, "as the policy says"),
    ],
)
def test_what_is_chosen_stays_up_to_its_bytes_and_to_the_resident_bytes_and_else_leaves(
    name: str, is_kept: bool, more_bytes: int, more_resident: int, expected: str
) -> None:
    counters = ByteCounters(None)
    keeping = Keeping(Policy(counters, LeavingQueue()), counters)
    keeping.allow(Allowance(Choices(frozenset({UP})), {UP: 1024}, 2048))
    group = TensorGroup(ChunkKey(0, 0), 0, name, GroupTraits(is_kept, layer=0))
    group.own_bytes, counters.resident_bytes = 1024 + more_bytes, 2048 + more_resident
    group.stays = keeping.may_stay(group)
    assert (group.stays, keeping.outgrows(group)) == (expected == "stays", expected == "leaves")
    assert counters.stats.num_outgrown_groups == more_bytes + more_resident


def test_a_kept_group_stays_where_that_its_backward_comes_at_once_is_taken_back() -> None:
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=1, directory="none", policy=Planned()))
    engine._keeping.allow(Allowance(Choices(frozenset({UP})), {UP: 256}, 1 << 30))
    with engine.iteration():
        chunk = engine.start_chunk(ChunkKey(0, 0))
        handles = []
        for name in ("up", "down"):
            chunk.open_group(name, GroupTraits(keep=True, layer=0))
            handles.append(chunk.tensor_push(torch.ones(256, dtype=torch.uint8)))
            chunk.close_group(keep=True)
        chunk.offload_kept_groups()
        assert [group.leaving_bytes + group.on_host_bytes > 0 for group in chunk.groups] == [False, True]
        del handles
    engine.close()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"version": 0}', '{"version": 1, "held_bytes": 1}', "nonsense"])
def test_what_is_no_plan_is_refused_by_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"^plan.json is not a plan of this version \(.*\): remove it") as caught:
        parse_saved(text, "plan.json")
    assert "\n" not in str(caught.value)


# -- the engine on the clocks of the simulator does what the simulator says -------------------------------------------


EQUAL = [
    dense_job(ATTENTION),
    dense_job(ALL, virtual=4),
    dense_job(MOST, max_inflight_bytes=1300),
    dense_job(MOST, horizon_bytes=2000),
    dense_job(ALL, max_inflight_bytes=2000, horizon_bytes=1300),
    DEEP,
    ONE_RANK,
    dense_job(("core_attn",), pipeline=4, virtual=2, layers=16),
    dense_job(("mlp_act",), virtual=1),
    # Budgets for which the reactive policy happens to guess what the plan knows.
    dense_job(ALL, resident_bytes=2000),
    with_bounds(ONE_RANK, resident_bytes=3072),
]


@pytest.mark.parametrize("job", EQUAL)
def test_engine_runs_the_step_that_the_simulator_predicts(job: PipelineJob) -> None:
    """Equal to the byte, and to a nanosecond."""
    engine, planned = run_engine(job), simulate_planned(job)
    counters = [rank.counters for rank in planned.ranks]
    assert planned.milliseconds == pytest.approx(engine.milliseconds, abs=1e-6)
    assert [rank.stalled_ms for rank in planned.ranks] == pytest.approx(engine.stalled, abs=1e-6)
    for name in ("peak_host_bytes", "peak_resident_bytes", "copied_out_bytes", "copied_in_bytes"):
        assert [getattr(c, name) >> 20 for c in counters] == [getattr(stats, name) >> 10 for stats in engine.stats]
    assert sum(c.num_misses for c in counters) == sum(stats.prefetch_misses for stats in engine.stats) == 0


@pytest.mark.parametrize("job", [ONE_RANK, dense_job(ALL), dense_job(MOST, max_inflight_bytes=1300)])
def test_a_step_that_asks_no_event_takes_as_long(job: PipelineJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a capture: copy-outs found complete at no boundary are waited for where the bound on copies demands it."""
    asking = run_engine(job)
    monkeypatch.setattr(ClockDevice, "is_complete", lambda self, event: False)
    captured = run_engine(job)
    assert captured.milliseconds == pytest.approx(asking.milliseconds, abs=1e-6)
    for name in ("peak_resident_bytes", "peak_host_bytes"):
        assert [getattr(s, name) for s in captured.stats] == [getattr(s, name) for s in asking.stats]


# -- steps of a pipeline ----------------------------------------------------------------------------------------------


def decided_together(pipeline: PipelineJob, share: float) -> list[Decider]:
    """Decide on each rank, by a step of the pipeline in which everything moves, for a share of what could stay."""
    floor, meeting, deciders = simulate_planned(pipeline), Meeting(len(pipeline.ranks)), []
    for number, (rank, measured) in enumerate(zip(pipeline.ranks, floor.ranks, strict=True)):
        job = Job(rank.actions, rank.shapes)
        model = flat_model(job)
        costs = Costs(pipeline.link, floor_ms=floor.milliseconds, waited_ms=measured.stalled_ms)
        ends = choose(job, model, 1 << 50, costs)
        budget = ends.floor.held_bytes + round(share * (ends.top.held_bytes - ends.floor.held_bytes))
        decider = Decider(budget, None, None, is_early_certain=True)  # type: ignore[arg-type]
        decider.join(tuple, partial(meeting.agree, number), (number, len(pipeline.ranks)))
        took_ms = tuple(each.milliseconds for each in measured.of_actions)
        decider.know(Known(job, model, costs, took_ms=took_ms), 0)
        deciders.append(decider)
    with ThreadPoolExecutor(len(deciders)) as threads:
        list(threads.map(decide_first, deciders))
    return deciders


@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("head_ms", [2.75, 15.0])
def test_first_predictions_of_a_pipeline_are_those_of_all_its_ranks(virtual: int, share: float, head_ms: float) -> None:
    """By its own times alone a rank would be up to a fifth too short, because others make it wait, or too long."""
    job = dense_job(ALL, virtual=virtual)
    shapes = ([dataclasses.replace(s, head_ms=head_ms * s.has_head) for s in rank.shapes] for rank in job.ranks)
    ranks = tuple(dataclasses.replace(rank, shapes=tuple(own)) for rank, own in zip(job.ranks, shapes, strict=True))
    job = PipelineJob(ranks, Link(40.0, 38.0))
    deciders = decided_together(job, share)
    planned = [present(d.known)._steps_of(d.actions).planned(present(d.chosen).best.decision) for d in deciders]
    decided = PipelineJob(
        tuple(RankJob(each.job.actions, each.job.shapes, each.job.bounds) for each in planned), job.link
    )
    truth_ms = simulate(decided, [each.plan for each in planned]).milliseconds
    for decider in deciders:
        chosen = present(decider.chosen)
        assert chosen.step_ms == pytest.approx(truth_ms, rel=0.015)
        assert chosen.floor.step_ms == pytest.approx(present(present(decider.known).costs.floor_ms))
        decider.correct_time(1.02 * truth_ms)
        assert present(decider.chosen).step_ms == pytest.approx(1.02 * truth_ms, rel=0.001)


# -- steps of many microbatches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", range(4))
def test_a_shortened_step_is_one_of_the_same_schedule(rank: int) -> None:
    for schedule, group in (
        (no_pipelining, 1),
        (lambda num: one_forward_one_backward(4, rank, num), 1),
        (lambda num: interleaved(4, rank, 2, num), 4),
    ):
        few = shortened(schedule(64))
        num = len({action.chunk.microbatch for action in few})
        assert few == tuple(schedule(num)) and 2 * num <= 64
        assert num >= 2 and max(count_alive(few)) == max(count_alive(schedule(64)))
        too_few = tuple(schedule(2 * num - group))
        assert shortened(too_few) == too_few, "it would not have half of them"


@pytest.mark.parametrize(("pipeline", "virtual"), [(1, 1), (4, 1), (2, 2)])
def test_a_choice_for_many_microbatches_is_made_with_few(pipeline: int, virtual: int) -> None:
    rank = dense_job(ALL, pipeline=pipeline, virtual=virtual, num_microbatches=16, layers=8).ranks[0]
    job = Job(rank.actions, rank.shapes)
    costs = Costs(options=layer_options(job))
    model = dataclasses.replace(flat_model(job), wasted_bytes=2 * GIB, overhead_bytes=3 * GIB)
    floor, top = (end.held_bytes for end in (choose(job, model, 1 << 50, costs)[1:3]))
    known = Known(job, model, costs)
    for budget in (floor, floor + (top - floor) // 5):
        expected = completed(choose(job, model, budget, costs), Predictor(job, model, costs))
        found = known.choose(job.actions, budget)
        assert (found.floor, found.top) == (expected.floor, expected.top) and found.best.held_bytes <= budget
        assert found.best.step_ms <= 1.01 * expected.best.step_ms
    assert 3 * len(known._steps[job.actions]._planned) < 2 * len(known._few[job.actions]._planned)
    with pytest.raises(BudgetError, match="less than the"):
        known.choose(job.actions, floor - 1)
