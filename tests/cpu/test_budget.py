# SPDX-License-Identifier: Apache-2.0
"""Budgets on the CPU device: they hold, change no result, and follow what a job does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from offload_engine import (
    Action,
    CheckpointOffload,
    ChunkKey,
    FixedBounds,
    GroupTraits,
    OffloadConfig,
    OffloadEngine,
    OffloadError,
    Planned,
    ResidentBudget,
    enable_activation_offloading,
    group_commit,
    group_start,
    manage_activations,
    offload_wrapper,
)
from offload_engine._budget.gauge import ResidentGauge
from offload_engine._budget.idleness import Idleness
from offload_engine._budget.margin import Margin
from offload_engine._budget.state import State
from offload_engine._budget.summary import BudgetSummary
from offload_engine.errors import BudgetError
from offload_engine.plan_files import load_plan, plot_budget, save_plan
from offload_engine.planning.moves import BACKWARD_END, COMMIT, Boundary
from offload_engine.schedule import backward_at_once, no_pipelining, one_forward_one_backward

HIDDEN, ROWS, DEPTH = 32, 64, 6
KIB = 1 << 10
GROWN = "gpu_budget: activations have grown, so one more step is measured with everything offloaded"


def config(**settings: Any) -> OffloadConfig:
    return OffloadConfig(min_tensor_bytes=1, directory="none", **settings)


def make_layer() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))


class Job:
    """A model that trains with Adam on random batches, the same in each job."""

    engine: OffloadEngine

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(make_layer() for _ in range(DEPTH)))
        self._optimizer = torch.optim.Adam(self.model.parameters())
        self._batches = torch.Generator().manual_seed(1)
        self.trace: list[Any] = []
        """Loss and gradients of each step."""
        self.peaks: list[int] = []
        self.states: list[State | None] = []

    def step(self, num_microbatches: int = 4, rows: int = ROWS) -> None:
        batches = [torch.randn(rows, HIDDEN, generator=self._batches) for _ in range(num_microbatches)]
        loss = self.run(batches)
        self.trace.append((loss, [p.grad.clone() for p in self.model.parameters() if p.grad is not None]))
        self._optimizer.step()
        self._optimizer.zero_grad()
        stats = self.engine.stats
        self.peaks.append(stats.peak_resident_bytes)
        controller = self.engine.budget
        self.states.append(None if controller is None else controller.state)

    def steps(self, num_steps: int, **settings: int) -> Job:
        for _ in range(num_steps):
            self.step(**settings)
        return self

    def run(self, batches: list[torch.Tensor]) -> float:
        raise NotImplementedError


class ByHand(Job):
    """The first of two pipeline stages: two microbatches are in flight."""

    def __init__(self, settings: OffloadConfig, num_in_flight: int = 2) -> None:
        super().__init__()
        self.engine = OffloadEngine(settings)
        self._num_in_flight = num_in_flight

    def actions(self, num_microbatches: int) -> list[Action]:
        if self._num_in_flight == 1:
            return no_pipelining(num_microbatches)
        return one_forward_one_backward(self._num_in_flight, 0, num_microbatches)

    def run(self, batches: list[torch.Tensor]) -> float:
        actions, total = self.actions(len(batches)), 0.0
        at_once, losses = backward_at_once(actions), {}
        with self.engine.iteration(actions, self.model.parameters()):
            for kind, key in actions:
                if kind == "F":
                    losses[key] = self._forward(key, batches[key.microbatch], key in at_once)
                    continue
                chunk, loss = losses.pop(key)
                chunk.begin_backward()
                loss.backward()
                total += loss.item()
        return total

    def _forward(self, key: ChunkKey, x: torch.Tensor, is_at_once: bool) -> Any:
        chunk = self.engine.start_chunk(key)
        for index, layer in enumerate(self.model):
            for name, part in (("up", layer[:2]), ("down", layer[2:])):
                keep = is_at_once and index == DEPTH - 1
                x = group_start(x, chunk, name, GroupTraits(layer=index, keep=keep))
                with chunk.saved_tensors_hooks():
                    x = part(x)
                x = group_commit(x, chunk)
        chunk.end_forward()
        return chunk, x.square().mean()


class ByFrontEnd(Job):
    """A front-end, which knows no schedule; an iteration for each microbatch."""

    def run(self, batches: list[torch.Tensor]) -> float:
        total = 0.0
        for batch in batches:
            with self.context():
                loss = self.model(batch).square().mean()
            loss.backward()
            total += loss.item()
        return total

    def context(self) -> Any:
        return nullcontext()


class ByLayers(ByFrontEnd):
    def __init__(self, settings: OffloadConfig) -> None:
        super().__init__()
        layers = list(self.model)
        self.handle = enable_activation_offloading(self.model, "none", config=settings, layers=layers)
        self.engine = self.handle.engine


class ByBytes(ByFrontEnd):
    def __init__(self, settings: OffloadConfig) -> None:
        super().__init__()
        self.handle = manage_activations(self.model, settings, group_bytes=40 * KIB)
        self.engine = self.handle.engine

    def context(self) -> Any:
        return self.handle


Make = Callable[[OffloadConfig], Job]
each_job = pytest.mark.parametrize("make", [ByHand, ByLayers, ByBytes])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums in another order would be other sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def all_kept(make: Make) -> Job:
    return make(config(dry_run=True)).steps(8)


def summary_of(engine: OffloadEngine) -> BudgetSummary | None:
    return None if engine.budget is None else engine.budget.summary


def lowest_budget(make: Make) -> int:
    """The floor, as a budget that everything fits has measured it; layers are not recomputed."""
    summary = summary_of(make(config(gpu_budget=1 << 40, recompute="off")).steps(8).engine)
    assert summary is not None
    return summary.lowest_bytes


def assert_same_training(job: Job, reference: Job) -> None:
    for (loss, grads), (expected_loss, expected) in zip(job.trace, reference.trace, strict=False):
        assert loss == expected_loss
        assert all(torch.equal(grad, other) for grad, other in zip(grads, expected, strict=True))


@each_job
def test_budgets_between_floor_and_no_offload_hold_and_change_no_result(make: Make) -> None:
    reference = all_kept(make)
    lowest, most = lowest_budget(make), max(reference.peaks)
    assert lowest < most
    moved = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        budget = round(lowest + share * (most - lowest))
        job = make(config(gpu_budget=budget, recompute="off")).steps(8)
        assert_same_training(job, reference)
        first = next(i for i, state in enumerate(job.states) if state in (State.VERIFY, State.HOLD))
        assert max(job.peaks[first + 2 :]) <= budget
        assert job.states[-1] is State.HOLD
        summary = summary_of(job.engine)
        assert summary is not None and summary.budget_bytes == budget
        assert max(job.peaks[first:]) <= summary.predicted_peak_bytes <= budget
        moved.append(job.engine.stats.copied_out_bytes)
    assert moved == sorted(moved, reverse=True) and moved[0] > 0 == moved[-1]


@each_job
def test_a_job_that_fits_moves_nothing(make: Make) -> None:
    job = make(config(gpu_budget=1 << 40)).steps(8)
    assert job.states[-1] is State.HOLD
    assert job.engine.stats.copied_out_bytes == 0
    assert job.engine.stats.num_outgrown_groups == 0


def test_it_is_held_within_five_steps_of_a_pipeline() -> None:
    job = ByHand(config(gpu_budget=1 << 40)).steps(7)
    floor, measure, verify = State.FLOOR, State.MEASURE, State.VERIFY
    assert job.states == [floor, floor, floor, measure, verify, State.HOLD, State.HOLD]


@each_job
def test_a_budget_below_the_floor_is_refused_with_what_would_help(make: Make) -> None:
    lowest = lowest_budget(make)
    with pytest.raises(BudgetError, match=r"gpu_budget is .* less than the .* Raise the budget, offload or recompute"):
        make(config(gpu_budget=lowest - 1, recompute="off")).steps(8)


def test_without_an_optimizer_it_waits() -> None:
    job = ByHand(config(gpu_budget=1 << 40))
    for _ in range(4):
        job.run([torch.randn(ROWS, HIDDEN)] * 2)
    assert summary_of(job.engine) is None
    assert job.engine.budget is not None and job.engine.budget.state is State.FLOOR


@each_job
def test_other_microbatches_and_evaluation_in_between(make: Make) -> None:
    reference, lowest = make(config(dry_run=True)), lowest_budget(make)
    budget = lowest + 3 * ROWS * HIDDEN * 4 * 4  # some groups stay
    job = make(config(gpu_budget=budget))
    for num_microbatches in (4, 4, 4, 4, 4, 2, 6, 1, 4, 6):
        for each in (job, reference):
            each.step(num_microbatches)
            with torch.no_grad():
                each.model(torch.ones(8 * ROWS, HIDDEN))
    assert_same_training(job, reference)
    assert max(job.peaks[5:]) <= budget


@each_job
def test_longer_sequences_keep_less_at_once_and_are_measured_again(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    longer = ROWS * 3 // 2
    reference = make(config(dry_run=True)).steps(6).steps(8, rows=longer)
    budget = round(0.95 * max(reference.peaks[:6]))
    job = make(config(gpu_budget=budget)).steps(6)
    moved_before = job.engine.stats.copied_out_bytes
    with caplog.at_level(logging.INFO):
        job.steps(8, rows=longer)
    assert [each.message for each in caplog.records].count(GROWN) == 1
    assert_same_training(job, reference)
    assert max(job.peaks[6:]) <= budget
    assert job.engine.stats.copied_out_bytes > 1.5 * moved_before
    assert job.states[-1] is State.HOLD


def test_sequences_that_no_longer_fit_are_offloaded_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    reference = ByLayers(config(dry_run=True)).steps(6).steps(8, rows=4 * ROWS)
    job = ByLayers(config(gpu_budget=max(reference.peaks[:6]))).steps(6).steps(8, rows=4 * ROWS)
    assert_same_training(job, reference)
    assert job.peaks[-1] < reference.peaks[-1]
    assert sum("of a step with everything offloaded" in each.message for each in caplog.records) <= 2


@each_job
def test_two_engines_in_a_process(make: Make) -> None:
    reference, lowest = all_kept(make), lowest_budget(make)
    budgets = (lowest + ROWS * HIDDEN * 4, 1 << 40)
    jobs = [make(config(gpu_budget=budget)) for budget in budgets]
    for _ in range(8):
        for job in jobs:
            job.step()
    for job, budget in zip(jobs, budgets, strict=True):
        assert_same_training(job, reference)
        assert max(job.peaks[5:]) <= budget
    assert jobs[0].engine.stats.copied_out_bytes > 0 == jobs[1].engine.stats.copied_out_bytes


@each_job
def test_a_plan_is_saved_and_given_back(make: Make, tmp_path: Path) -> None:
    lowest = lowest_budget(make)
    budget, file = lowest + 2 * ROWS * HIDDEN * 4 * 4, tmp_path / "plan.json"
    job = make(config(gpu_budget=budget)).steps(8)
    save_plan(job.engine, file)
    resumed = make(config(gpu_budget=budget))
    load_plan(resumed.engine, file)
    resumed.steps(4)
    assert_same_training(resumed, job)
    assert resumed.states == [State.HOLD] * 4
    assert max(resumed.peaks[1:]) <= budget
    assert resumed.engine.stats.copied_out_bytes == job.engine.stats.copied_out_bytes
    save_plan(resumed.engine, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == file.read_text()


def test_a_plan_of_another_model_is_refused_by_one_line(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    save_plan(ByHand(config(gpu_budget=1 << 40)).steps(6).engine, file)
    job = ByLayers(config(gpu_budget=1 << 40))
    load_plan(job.engine, file)
    with pytest.raises(
        ValueError, match=r"^\S+plan.json is of another model or layout: it names a group 0 0 down 0 .*$"
    ):
        job.steps(2)


def test_a_plan_that_takes_more_than_the_budget_is_not_used(tmp_path: Path) -> None:
    file, most = tmp_path / "plan.json", max(all_kept(ByHand).peaks)
    save_plan(ByHand(config(gpu_budget=1 << 40)).steps(6).engine, file)
    job = ByHand(config(gpu_budget=round(0.8 * most)))
    load_plan(job.engine, file)
    job.steps(6)
    assert job.states[0] is State.FLOOR
    assert max(job.peaks[4:]) <= 0.8 * most


def test_files_need_a_budget_and_a_decision(tmp_path: Path) -> None:
    for engine in (OffloadEngine(config()), OffloadEngine(config(gpu_budget=1))):
        with pytest.raises(OffloadError, match="has no gpu_budget, or has not measured a step yet"):
            save_plan(engine, tmp_path / "plan.json")
        with pytest.raises(OffloadError, match="nothing to draw"):
            plot_budget(engine, tmp_path / "plan.png")
    with pytest.raises(OffloadError, match="comes before the first iteration"):
        load_plan(OffloadEngine(config()), tmp_path / "plan.json")
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ValueError, match=r"plan.json is no plan of this version \(KeyError: 'version'\): remove it"):
        load_plan(OffloadEngine(config(gpu_budget=1)), tmp_path / "plan.json")


def test_an_exception_in_a_measured_step_measures_the_next(tmp_path: Path) -> None:
    job = ByHand(config(gpu_budget=1 << 40)).steps(3)
    with pytest.raises(ZeroDivisionError), job.engine.iteration(job.actions(4)):
        raise ZeroDivisionError
    assert job.engine.budget is not None and job.engine.budget.state is State.MEASURE
    job.steps(3)
    assert job.states[-1] is State.HOLD


def test_the_report_says_what_stays_and_what_it_takes() -> None:
    most = max(all_kept(ByHand).peaks)
    job = ByHand(config(gpu_budget=round(0.7 * most))).steps(8)
    text = job.engine.report()
    assert "Budget: a step by group" in text and "lowest budget" in text
    summary = summary_of(job.engine)
    assert summary is not None
    assert summary.measured_peak_bytes == job.peaks[-1] and summary.measured_step_ms > 0
    curve = job.engine.budget.curve
    assert [nbytes for nbytes, _ in curve] == sorted(nbytes for nbytes, _ in curve)


@pytest.mark.parametrize(
    "settings",
    [{"policy": ResidentBudget(5)}, {"policy": FixedBounds(horizon_bytes=5)}, {"policy": Planned(resident_bytes=5)}],
)
def test_a_budget_beside_other_bounds_is_refused_by_a_sentence_that_names_both(settings: dict[str, Any]) -> None:
    bound = f"policy={settings['policy']!r}"
    with pytest.raises(ValueError) as caught:
        config(gpu_budget=1 << 30, **settings)
    assert str(caught.value).startswith(f"gpu_budget=1,073,741,824 and {bound} both decide what stays on the device")
    assert config(gpu_budget=1, policy=Planned()).gpu_budget == 1
    with pytest.raises(ValueError, match="dry_run moves nothing: leave one out"):
        config(gpu_budget=1, dry_run=True)
    with pytest.raises(TypeError, match="gpu_budget must be an integer number of bytes, .*got '60GiB'"):
        config(gpu_budget="60GiB")
    with pytest.raises(ValueError, match="gpu_budget must not be negative"):
        config(gpu_budget=-1)


def test_every_front_end_takes_a_budget() -> None:
    settings = config(gpu_budget=1 << 30)
    assert CheckpointOffload(settings).engine.budget is not None
    with pytest.raises(
        ValueError, match="activation_loading_horizon=2 and gpu_budget=1,073,741,824 of the config both"
    ):
        offload_wrapper(nn.Sequential(), 2, config=settings)


class Allocator:
    """A GPU's allocator on the CPU: what the engine has resident, `base` more, and what it has ever reserved.

    Args:
        base: at each boundary.
        waste: reserved in vain, for each byte of groups, once they stay: no model knows of it.
    """

    def __init__(self, engine: OffloadEngine, base: int, waste: float = 0.0) -> None:
        self._gauge, self._counters = ResidentGauge(engine._store.counters), engine._store.counters
        self._base, self._waste = base, waste
        self._reserved = 0
        self.num_trims = 0

    def peak_bytes(self) -> int:
        return self._base + self._gauge.peak_bytes()

    def reset(self) -> None:
        self._note()
        self._gauge.reset()

    def held_bytes(self) -> int:
        self._note()
        return self._reserved

    def outside_bytes(self) -> int:
        return 0

    def total_bytes(self) -> int:
        return 1 << 30

    def trim(self) -> None:
        self._reserved, self.num_trims = 0, self.num_trims + 1

    def _note(self) -> None:
        stats = self._counters.stats
        stayed = stats.managed_bytes - stats.copied_out_bytes
        self._reserved = max(self._reserved, self.peak_bytes() + KIB + round(self._waste * max(0, stayed)))


def on_gpu(budget: int, base: int, waste: float = 0.0) -> tuple[ByHand, Allocator]:
    job = ByHand(config(gpu_budget=budget))
    controller = job.engine.budget
    assert controller is not None
    gauge = Allocator(job.engine, base, waste)
    controller._last.gauge = gauge
    return job, gauge


def test_what_is_reserved_and_not_allocated_counts() -> None:
    reference = all_kept(ByHand)
    base, most = 1 << 20, max(reference.peaks)
    job, gauge = on_gpu(base + KIB + round(0.7 * most), base)
    job.steps(8)
    assert_same_training(job, reference)
    summary = summary_of(job.engine)
    assert summary is not None and job.states[-1] is State.HOLD
    assert summary.measured_peak_bytes <= summary.predicted_peak_bytes <= base + KIB + round(0.7 * most)
    assert summary.kept_bytes > 0 and gauge.num_trims == 2  # with optimizer state, and what the floor had left


def test_a_wrong_model_is_corrected_at_most_three_times() -> None:
    reference = all_kept(ByHand)
    base, most = 1 << 20, max(reference.peaks)
    budget = base + KIB + round(0.8 * most)
    job, gauge = on_gpu(budget, base, waste=0.1)
    job.steps(10)
    assert_same_training(job, reference)
    assert job.states[-1] is State.HOLD and State.HOLD in job.states[:8]
    assert 3 <= gauge.num_trims <= 5
    controller = job.engine.budget
    assert controller is not None and controller.decider._model is not None
    assert controller.decider._model.correction_bytes > 0
    assert gauge.held_bytes() <= budget


class Fragments(Allocator):
    """Reserves in vain what `of_steps` says, step by step from the first that is planned, and `in_floor` before."""

    engine: OffloadEngine
    of_steps: tuple[int, ...] = ()
    in_floor = 0
    before_trim = 0
    """More, until memory is returned for the first time."""

    def _note(self) -> None:
        controller = self.engine.budget
        assert controller is not None
        number = controller.num_planning_steps - 5
        wasted = self.in_floor if number < 0 else self.of_steps[min(number, len(self.of_steps) - 1)]
        self._reserved = max(self._reserved, self.peak_bytes() + wasted + self.before_trim * (not self.num_trims))


def on_fragments(budget: int, in_floor: int, *of_steps: int) -> tuple[ByHand, Fragments]:
    job, plain = on_gpu(budget, 1 << 20)
    gauge = Fragments(job.engine, 1 << 20)
    gauge.engine, gauge.in_floor, gauge.of_steps = job.engine, in_floor, of_steps or (in_floor,)
    assert job.engine.budget is not None
    job.engine.budget._last.gauge = gauge
    return job, gauge


def waiting(job: ByHand, wait_ms: float = 1.0) -> ByHand:
    """A job in which compute waits so long for copies: where it does, more on the device is worth something."""
    controller = job.engine.budget
    assert controller is not None
    decide = type(controller.decider)._choose.__get__(controller.decider)

    def choose(*arguments: Any) -> Any:
        found = decide(*arguments)
        best = found.best._replace(exposed_ms={"layer": wait_ms}, step_ms=found.best.step_ms + found.best.num_moves)
        return found._replace(best=best)

    controller.decider._choose = choose  # type: ignore[method-assign]
    return job


@pytest.mark.parametrize("make", [ByHand, ByLayers, ByBytes])
@pytest.mark.parametrize("fits", [True, False])
def test_a_job_that_fits_well_runs_without_groups_but_for_one_step_in_each_window(make: Make, fits: bool) -> None:
    reference, base = make(config(dry_run=True)).steps(9), 1 << 20
    most = base + max(reference.peaks)
    job = make(config(gpu_budget=most * 5 // 4 if fits else most * 17 // 16, recompute="off"))
    controller = job.engine.budget
    assert controller is not None
    controller._idleness.is_measured, controller._last.gauge = True, Allocator(job.engine, base)
    started: list[int] = []
    start_chunk = job.engine.start_chunk
    job.engine.start_chunk = lambda *args, **kwargs: (started.append(1), start_chunk(*args, **kwargs))[1]  # type: ignore[assignment, func-returns-value]
    for _ in range(9):
        started.clear()
        job.step()
    assert job.states[-1] is State.HOLD and job.engine.stats.copied_out_bytes == 0
    assert_same_training(job, reference)
    is_by_hand = make is ByHand  # who opens groups in spite of it is served
    assert bool(started) == (is_by_hand or not fits or make is ByBytes)
    assert job.engine.is_idle == fits


def test_steps_that_differ_have_groups() -> None:
    base, most = 1 << 20, max(all_kept(ByLayers).peaks)
    job = ByLayers(config(gpu_budget=base + 4 * most, recompute="off"))
    controller = job.engine.budget
    assert controller is not None
    controller._idleness.is_measured, controller._last.gauge = True, Allocator(job.engine, base)
    job.steps(1, rows=ROWS * 17 // 16).steps(8)
    assert job.states[-1] is State.HOLD and not job.engine.is_idle


@pytest.mark.parametrize(("most", "are_alike"), [(640, True), (650, True), (651, False)])
def test_steps_are_alike_within_a_64th(most: int, are_alike: bool) -> None:
    idleness, fits = Idleness(is_measured=True), SimpleNamespace(num_moves=0, recomputed_bytes=0, held_bytes=0)
    for saved in (640, 640, 640, 640, most):
        assert not idleness.allows(SimpleNamespace(best=fits), budget_bytes=1)  # type: ignore[arg-type]
        idleness.note(saved)
    assert idleness.allows(SimpleNamespace(best=fits), budget_bytes=1) == are_alike  # type: ignore[arg-type]


def test_what_was_reserved_in_vain_before_optimizers_had_their_state_does_not_count() -> None:
    """At 32,768 tokens predictions were 4 GiB too high: the first steps had left as much in pieces."""
    most = max(all_kept(ByHand).peaks)
    job, gauge = on_fragments(1 << 40, 10 * KIB)
    gauge.before_trim = most
    job.steps(8)
    summary = summary_of(job.engine)
    assert summary is not None
    controller = job.engine.budget
    assert controller is not None and controller.decider._model is not None
    # Copies are threads: a step before may have held more at its peak than the measured one.
    assert 10 * KIB <= controller.decider._model.overhead_bytes < most // 4


def test_the_first_decision_leaves_half_of_what_the_floor_reserves_in_vain() -> None:
    """Fragments of a decision are not those of the floor: planned steps held 770 MiB more than their budget."""
    most, wasted = max(all_kept(ByHand).peaks), 100 * KIB
    budget = (1 << 20) + wasted + round(0.8 * most)
    job, gauge = on_fragments(budget, wasted, wasted * 3 // 2)
    controller = job.engine.budget
    assert controller is not None
    while State.HOLD not in job.states:
        waiting(job, 0.0).step()  # on a busy machine measured copies are late, and what was left would be used
    assert job.states[-2:] == [State.VERIFY, State.HOLD]  # no step was above, so nothing is corrected
    assert controller.decider.guard_bytes >= wasted // 2
    assert gauge.held_bytes() <= budget and controller.measured_bytes <= budget
    summary = summary_of(job.engine)
    assert summary is not None and summary.predicted_peak_bytes == controller.measured_bytes


def test_what_a_first_decision_leaves_is_used_and_given_back_where_it_was_too_much() -> None:
    most, wasted = max(all_kept(ByHand).peaks), 400 * KIB
    budget = (1 << 20) + wasted + round(0.6 * most)
    for second in (wasted // 2, 3 * wasted):
        job, gauge = on_fragments(budget, wasted, wasted // 2, second, wasted // 2)
        moved = []
        for _ in range(10):
            waiting(job).step()
            moved.append(job.engine.stats.copied_out_bytes)
        assert job.states[-1] is State.HOLD
        first, used, last = moved[4], moved[5], moved[-1]
        assert used < first
        verified = job.states.count(State.VERIFY)
        assert (verified, last) == ((2, used) if second < wasted else (3, first))
        assert gauge.held_bytes() <= budget


def test_keeps_less_at_once_where_all_else_has_grown_and_more_after_a_while() -> None:
    base, most = 1 << 20, max(all_kept(ByHand).peaks)
    job, gauge = on_gpu(base + KIB + round(0.8 * most), base)
    job.steps(6)
    before = job.engine.stats.copied_out_bytes
    gauge._base += most // 4
    job.steps(3)
    assert job.states[-1] is State.HOLD
    assert job.engine.stats.copied_out_bytes > before
    assert gauge.held_bytes() <= base + KIB + round(0.8 * most)


def test_a_peak_between_two_steps_changes_no_decision() -> None:
    base, most = 1 << 20, max(all_kept(ByHand).peaks)
    job, gauge = on_gpu(base + KIB + round(0.8 * most), base)
    job.steps(6)
    before = summary_of(job.engine)
    gauge._base += 10 * most
    gauge.held_bytes()  # as an evaluation may have
    gauge._base -= 10 * most
    job.steps(2)
    assert gauge.num_trims == 3  # the first two are of the decision
    after = summary_of(job.engine)
    assert before is not None and after is not None
    assert after.predicted_peak_bytes == before.predicted_peak_bytes


def test_ranks_decide_alike_by_the_worst_of_each_figure() -> None:
    """A rank that agrees with one that has less room keeps as little; each exchanges as many numbers.

    How many groups leave depends on measured times as well, which differ from run to run.
    """
    base, most = 1 << 20, max(all_kept(ByHand).peaks)
    budget = base + KIB + round(0.8 * most)
    exchanged: dict[int, list[tuple[int, ...]]] = {}

    def run(base_of_rank: int, others: list[tuple[int, ...]]) -> ByHand:
        job, _ = on_gpu(budget, base_of_rank)
        controller, own = job.engine.budget, []
        assert controller is not None

        def agree(numbers: tuple[int, ...]) -> tuple[int, ...]:
            own.append(numbers)
            if len(own) > len(others):
                return numbers
            assert len(numbers) == len(others[len(own) - 1])
            return tuple(map(max, numbers, others[len(own) - 1]))

        controller.decider.agree = agree
        exchanged[base_of_rank] = own
        return job.steps(8)

    alone = run(base, [])
    worst = run(base + most // 4, [])
    both = run(base, exchanged[base + most // 4])
    chosen = [job.engine.budget.decider.chosen for job in (alone, worst, both)]  # type: ignore[union-attr]
    assert chosen[2].floor.held_bytes >= chosen[1].floor.held_bytes
    assert min(chosen[1].best.num_moves, chosen[2].best.num_moves) > chosen[0].best.num_moves


def test_memory_is_measured_at_every_boundary_of_groups() -> None:
    job = ByHand(config(gpu_budget=1 << 40)).steps(5)
    controller = job.engine.budget
    assert controller is not None and controller.decider._model is not None
    measured = controller.decider._model.other_bytes
    for chunk in {action.chunk for action in job.actions(4)}:
        for index in range(2 * DEPTH):
            assert Boundary(COMMIT, chunk, index) in measured
            assert Boundary(BACKWARD_END, chunk, index) in measured or index == 0  # the input needs no gradient


def test_every_rank_agrees_as_often_whatever_befalls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one would wait for the others for ever. What befalls one rank is answered by all when a window is over."""
    monkeypatch.setattr("offload_engine._budget.controller._WINDOW_STEPS", 5)
    base, most = 1 << 20, max(all_kept(ByHand).peaks)
    sizes: dict[str, list[int]] = {}
    for name in ("calm", "memory", "sequences"):
        job, gauge = on_gpu(base + KIB + round(0.8 * most), base)
        controller, sizes[name] = job.engine.budget, []
        assert controller is not None

        def agree(numbers: tuple[int, ...], own: list[int] = sizes[name]) -> tuple[int, ...]:
            own.append(len(numbers))
            return numbers

        controller.decider.agree = agree
        job.steps(6)
        gauge._base += most // 4 if name == "memory" else 0
        job.steps(3, rows=ROWS * 3 // 2 if name == "sequences" else ROWS)
        assert job.states[-1] is State.HOLD
    assert sizes["calm"] == sizes["memory"] == sizes["sequences"]


def test_what_the_allocator_had_before_does_not_count() -> None:
    base, most = 1 << 20, max(all_kept(ByHand).peaks)
    job, gauge = on_gpu(base + KIB + most, base)
    gauge._reserved = 10 * most + base
    job.steps(8)
    assert job.states[-1] is State.HOLD and gauge.num_trims == 2


# -- auto -------------------------------------------------------------------------------------------------------------


def test_auto_leaves_twice_what_varied_from_step_to_step() -> None:
    margin = Margin(1 << 40)
    assert margin.budget_bytes() == (1 << 40) - (128 << 20)
    for extra in (9 << 30, 300 << 20, 500 << 20, 400 << 20):  # in the first step libraries are loaded
        margin.note((10 << 30) + extra, 10 << 30)
    assert margin.budget_bytes() == (1 << 40) - (400 << 20)


def test_auto_decides_by_the_measured_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which only a part of what is saved fits."""
    most = max(all_kept(ByHand).peaks)
    total = (128 << 20) + KIB + round(0.7 * most)
    monkeypatch.setattr(ResidentGauge, "total_bytes", lambda self: total)
    job = ByHand(config(gpu_budget="auto")).steps(8)
    summary = summary_of(job.engine)
    assert summary is not None and summary.budget_bytes == total - (128 << 20)
    assert job.states[-1] is State.HOLD and max(job.peaks[5:]) <= summary.budget_bytes
    assert 0 < job.engine.stats.copied_out_bytes


def test_auto_measures_its_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the third step the process holds 100 MiB more besides what is allocated."""
    extra = [0]
    monkeypatch.setattr(ResidentGauge, "total_bytes", lambda self: 1 << 40)
    monkeypatch.setattr(ResidentGauge, "held_bytes", lambda self: self.peak_bytes() + extra[0])
    job = ByHand(config(gpu_budget="auto"))
    for number in range(6):
        extra[0] = (100 << 20) * (number == 2)
        job.step()
    summary = summary_of(job.engine)
    assert summary is not None and summary.budget_bytes == (1 << 40) - (200 << 20)


def test_auto_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="gpu_budget='auto' depends on the memory of a GPU, and there is none here"):
        OffloadEngine(config(gpu_budget="auto"))
    with pytest.raises(TypeError, match="gpu_budget must be an integer number of bytes, .*got 'all'"):
        config(gpu_budget="all")
    with pytest.raises(ValueError, match="gpu_budget='auto' and policy=ResidentBudget"):
        config(gpu_budget="auto", policy=ResidentBudget(5))


# -- out of memory ----------------------------------------------------------------------------------------------------


def run_out(job: ByHand, gauge: Allocator, extra: int = 0, waste: int = 0) -> str:
    """Run out of memory in the third layer of a step, in which so much is taken; return the note of the error."""

    def fail(*_: object) -> None:
        gauge._base += extra
        gauge._reserved = gauge.held_bytes() + waste
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    handle = job.model[2][0].register_forward_pre_hook(fail)  # type: ignore[index]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        job.step()
    handle.remove()
    [note] = caught.value.__notes__
    return note


@pytest.mark.parametrize(
    ("part", "extra", "waste"),
    [
        ("All else that is allocated has grown the most, by 3.00 GiB: weights, gradients, optimizer state", 3 << 30, 0),
        ("What is reserved in vain or outside of torch has grown the most, by 2.00 GiB: fragments", 0, 2 << 30),
    ],
)
def test_running_out_of_memory_says_what_was_expected_and_what_has_grown(part: str, extra: int, waste: int) -> None:
    most = max(all_kept(ByHand).peaks)
    job, gauge = on_gpu((4 << 30) + most, 4 << 30)
    early = run_out(job, gauge)
    assert "and nothing was planned yet: everything was being offloaded. When memory ran out there were" in early
    job.steps(8)
    note = run_out(job, gauge, extra, waste)
    assert note.startswith(
        "gpu_budget is 4.00 GiB, and the plan expected 4.00 GiB at the most: 0.00 GiB of groups of saved tensors, "
        "4.00 GiB of all else that is allocated, 0.00 GiB of what is reserved in vain or outside of torch. When"
    )
    assert part in note
    job.steps(1)
    assert job.states[-1] is State.HOLD


def test_running_out_of_memory_is_explained_by_front_ends_and_with_a_budget_only() -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    for settings, num_notes in ((config(gpu_budget=1 << 40), 1), (config(), 0)):
        job = ByLayers(settings).steps(6)
        job.model[2].register_forward_pre_hook(fail)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            job.step()
        notes = getattr(caught.value, "__notes__", [])
        assert len(notes) == num_notes
        assert all("so the budget is more than this GPU has left" in note for note in notes)
