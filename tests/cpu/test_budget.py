# SPDX-License-Identifier: Apache-2.0
"""Budgets on the CPU device: they hold, change no result, and follow what a job does."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.optim import optimizer as torch_optimizer

from offload_engine import (
    Action,
    CheckpointOffload,
    ChunkKey,
    OffloadConfig,
    OffloadEngine,
    OffloadError,
    Planned,
    enable_activation_offloading,
    manage_activations,
    offload_wrapper,
)
from offload_engine._budget.gauge import ResidentGauge
from offload_engine._budget.idleness import Idleness
from offload_engine._budget.state import State
from offload_engine._budget.summary import BudgetSummary
from offload_engine._devices.cpu import CpuDevice
from offload_engine.errors import BudgetError
from offload_engine.frontends.integrations.pipelining import offload_schedule
from offload_engine.plan_files import load_plan, plot_budget, save_plan
from offload_engine.planning.memory import MeasuredMemory, make_groups_model
from offload_engine.planning.moves import BACKWARD_END, COMMIT, Boundary
from offload_engine.schedule import backward_at_once, one_forward_one_backward
from offload_engine.sizes import short_size
from tests.engine_state import in_group

pytestmark = pytest.mark.usefixtures("one_thread")
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
    rows = ROWS

    def __init__(self, model: nn.Sequential | None = None) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(*(make_layer() for _ in range(DEPTH))) if model is None else model
        self._optimizer = torch.optim.Adam(self.model.parameters())
        self._batches = torch.Generator().manual_seed(1)
        self.trace: list[Any] = []
        """Loss and gradients of each step, and the state of the random numbers behind it."""
        self.peaks: list[int] = []
        self.moved: list[int] = []
        self.states: list[State | None] = []

    def step(self, num_microbatches: int = 4, rows: int | None = None) -> None:
        batches = [torch.randn(rows or self.rows, HIDDEN, generator=self._batches) for _ in range(num_microbatches)]
        loss = self.run(batches)
        grads = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.trace.append((loss, grads, torch.get_rng_state()))
        self._optimizer.step()
        self._optimizer.zero_grad()
        stats = self.engine.stats
        self.peaks.append(stats.peak_resident_bytes)
        self.moved.append(stats.copied_out_bytes)
        self.states.append(None if self.engine.budget is None else self.controller.state)

    def steps(self, num_steps: int, **settings: int) -> Self:
        for _ in range(num_steps):
            self.step(**settings)
        return self

    def run(self, batches: list[torch.Tensor]) -> float:
        raise NotImplementedError

    @property
    def controller(self) -> Any:
        assert self.engine.budget is not None
        return self.engine.budget

    @property
    def summary(self) -> BudgetSummary:
        assert self.controller.summary is not None
        return self.controller.summary


class ByHand(Job):
    """The first of two pipeline stages: two microbatches are in flight."""

    def __init__(self, settings: OffloadConfig) -> None:
        super().__init__()
        self.engine = OffloadEngine(settings)

    def actions(self, num_microbatches: int) -> list[Action]:
        return one_forward_one_backward(2, 0, num_microbatches)

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
                x = in_group(chunk, part, x, name=name, layer=index, keep=is_at_once and index == DEPTH - 1)
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
    def __init__(self, settings: OffloadConfig, model: nn.Sequential | None = None) -> None:
        super().__init__(model)
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


class ByCheckpoints(ByFrontEnd):
    def __init__(self, settings: OffloadConfig) -> None:
        super().__init__()
        self._offload = CheckpointOffload(settings)
        self.engine = self._offload.engine
        for layer in self.model:
            layer.forward = partial(self._offload.checkpoint, layer.forward)

    def context(self) -> Any:
        stack = ExitStack()
        stack.callback(self._offload.end_forward)
        return stack


Make = Callable[[OffloadConfig], Job]
each_job = pytest.mark.parametrize("make", [ByHand, ByLayers, ByBytes])


def all_kept(make: Make) -> Job:
    return make(config(dry_run=True)).steps(8)


@cache
def most_of(make: Make = ByHand) -> int:
    return max(all_kept(make).peaks)


@cache
def lowest_budget(make: Make) -> int:
    """The floor, as a budget that everything fits has measured it; layers are not recomputed."""
    return make(config(gpu_budget=1 << 40, recompute="off")).steps(8).summary.lowest_bytes


def assert_same_training(job: Job, reference: Job) -> None:
    for found, expected in zip(job.trace, reference.trace, strict=False):
        assert found[0] == expected[0]
        assert all(torch.equal(grad, other) for grad, other in zip(found[1], expected[1], strict=True))
        assert torch.equal(found[2], expected[2])


@pytest.fixture
def same_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change no decision by the times of steps, which a busy machine makes random."""
    monkeypatch.setattr("offload_engine._budget.decide._WORTH_A_CHANGE", 0.0)


@pytest.fixture
def prompt_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete each copy-out before the next boundary, however late its thread gets a core of a busy machine."""
    copy_out = CpuDevice.copy_out

    def complete(device: CpuDevice, *arguments: Any) -> Any:
        event = copy_out(device, *arguments)
        device.synchronize(event)
        return event

    monkeypatch.setattr(CpuDevice, "copy_out", complete)


@pytest.mark.usefixtures("prompt_copies")
@each_job
def test_budgets_between_floor_and_no_offload_hold_and_change_no_result(make: Make) -> None:
    reference = all_kept(make)
    lowest, most = lowest_budget(make), max(reference.peaks)
    assert lowest < most
    moved = []
    for share in (0.0, 0.3, 0.7, 1.0):
        budget = round(lowest + share * (most - lowest))
        job = make(config(gpu_budget=budget, recompute="off")).steps(8)
        assert_same_training(job, reference)
        first = next(i for i, state in enumerate(job.states) if state in (State.VERIFY, State.HOLD))
        assert max(job.peaks[first + 2 :]) <= budget == job.summary.budget_bytes
        assert job.states[-1] is State.HOLD
        assert max(job.peaks[first:]) <= job.summary.predicted_peak_bytes <= budget
        moved.append(job.moved[-1])
    assert moved == sorted(moved, reverse=True) and moved[0] > 0 == moved[-1]
    with pytest.raises(BudgetError, match=r"gpu_budget is .* less than the .* Raise the budget, recompute") as caught:
        make(config(gpu_budget=lowest - 1, recompute="off")).steps(8)
    assert "offloaded (saved tensors in use or being copied; without a GPU nothing else counts)." in str(caught.value)


def test_it_is_held_after_five_steps_of_an_optimizer_that_measure_memory_at_every_boundary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = list[Boundary]()

    def noted(job: Any, memory: MeasuredMemory) -> Any:
        measured.extend(each.boundary for each in memory.boundaries)
        return make_groups_model(job, memory)

    monkeypatch.setattr("offload_engine._budget.learn.make_groups_model", noted)
    job = ByHand(config(gpu_budget=1 << 40))
    for _ in range(4):
        job.run([torch.randn(ROWS, HIDDEN)] * 2)
    assert job.controller.summary is None and job.controller.state is State.FLOOR
    job = ByHand(config(gpu_budget=1 << 40)).steps(2)
    with pytest.raises(ZeroDivisionError), job.engine.iteration(job.actions(4)):
        raise ZeroDivisionError  # so that the next step is measured
    assert job.controller.state is State.MEASURE
    floor, measure, verify = State.FLOOR, State.MEASURE, State.VERIFY
    assert job.steps(4).states == [floor, floor, measure, verify, verify, State.HOLD]
    for chunk in {action.chunk for action in job.actions(4)}:
        for index in range(2 * DEPTH):
            assert Boundary(COMMIT, chunk, index) in measured
            assert Boundary(BACKWARD_END, chunk, index) in measured or index == 0  # the input needs no gradient


@each_job
def test_other_microbatches_evaluation_in_between_and_another_engine_in_the_process(make: Make) -> None:
    reference, budget = make(config(dry_run=True)), lowest_budget(make) + 3 * ROWS * HIDDEN * 4 * 4  # some groups stay
    job = make(config(gpu_budget=budget))
    for num_microbatches in (4, 4, 4, 4, 4, 2, 6, 4):
        for each in (job, reference):
            each.step(num_microbatches)
            with torch.no_grad():
                each.model(torch.ones(8 * ROWS, HIDDEN))
    assert_same_training(job, reference)
    assert max(job.peaks[5:]) <= budget


@each_job
def test_longer_sequences_keep_less_and_are_measured_again(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    longer = ROWS * 3 // 2
    reference = make(config(dry_run=True)).steps(6).steps(8, rows=longer)
    budget = round(0.95 * max(reference.peaks[:6]))
    job = make(config(gpu_budget=budget)).steps(6)
    with caplog.at_level(logging.INFO):
        job.steps(8, rows=longer)
    assert [each.message for each in caplog.records].count(GROWN) == 1
    assert_same_training(job, reference)
    assert max(job.peaks[6:]) <= budget and job.moved[-1] > 1.5 * job.moved[5]
    assert job.states[-1] is State.HOLD


@each_job
def test_a_plan_is_saved_and_given_back(make: Make, tmp_path: Path) -> None:
    budget, file = lowest_budget(make) + 2 * ROWS * HIDDEN * 4 * 4, tmp_path / "plan.json"
    job = make(config(gpu_budget=budget)).steps(8)
    save_plan(job.engine, file)
    resumed = make(config(gpu_budget=budget))
    load_plan(resumed.engine, file)
    resumed.steps(4)
    assert_same_training(resumed, job)
    assert resumed.states == [State.HOLD] * 4 and max(resumed.peaks[1:]) <= budget
    assert resumed.moved[-1] == job.moved[-1]
    known, found = job.summary, resumed.summary
    names = [field.name for field in dataclasses.fields(found) if field.name[:8] not in ("measured", "outside_")]
    assert [getattr(found, name) for name in names] == [getattr(known, name) for name in names]
    assert 0 < found.measured_peak_bytes <= budget and found.measured_step_ms > 0
    assert "Budget: the whole step" in resumed.controller.report() and "by group" not in resumed.controller.report()
    save_plan(resumed.engine, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == file.read_text()


def test_where_chunks_differ_all_is_moved(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decision before would have nothing move, and what has grown be measured in each second step."""
    longer = ROWS * 3 // 2
    reference = ByHand(config(dry_run=True)).steps(6).steps(20, rows=longer)
    job = ByHand(config(gpu_budget=max(reference.peaks[:6]))).steps(6)
    assert job.moved[-1] == 0
    policy = job.controller.decider._policy
    without = SimpleNamespace(own_bounds=policy.own_bounds, slots=policy.slots, shapes=lambda actions: None)
    monkeypatch.setattr(job.controller.decider, "_policy", without)  # a compiled one takes no other method
    job.steps(20, rows=longer)
    assert [each.message.startswith("gpu_budget: no step could be planned") for each in caplog.records].count(True) == 1
    assert job.states[-1] is State.HOLD and all(job.moved[-10:]) and not job.controller.is_idle
    assert job.controller.summary is None
    assert_same_training(job, reference)


def test_a_plan_of_another_model_is_refused_and_one_above_the_budget_is_not_used(tmp_path: Path) -> None:
    file, most = tmp_path / "plan.json", most_of()
    save_plan(ByHand(config(gpu_budget=1 << 40)).steps(6).engine, file)
    job = ByHand(config(gpu_budget=round(0.8 * most)))
    load_plan(job.engine, file)
    job.steps(6)
    assert job.states[0] is State.FLOOR and max(job.peaks[4:]) <= 0.8 * most
    other, plan = ByLayers(config(gpu_budget=1 << 40)), json.loads(file.read_text())
    load_plan(other.engine, file)
    file.write_text(json.dumps({**plan, "held_bytes": 1 << 41}))
    load_plan(other.engine, file)  # is above the budget, so that the first one stays
    missing = r"names a group that is not here \(stage 0, layer 0, down, part 0\), and has 12 groups, this rank \d+\."
    with pytest.raises(ValueError, match=rf"^\S+plan.json is of another model or layout: it {missing}"):
        other.steps(2)
    figures = {**plan["figures"], "step_ms": "1"}
    wrong: list[tuple[str, Any]] = [
        ("held_bytes", None),
        ("held_bytes", 1.5),
        ("slots", [["0", *plan["slots"][0][1:]]]),
    ]
    for name, value in (*wrong, ("figures", figures), ("figures", {}), ("model", 3)):
        file.write_text(json.dumps({**plan, name: value}))
        with pytest.raises(ValueError, match="plan.json is not a plan of this version .* remove it"):
            load_plan(OffloadEngine(config(gpu_budget=1)), file)


def test_a_plan_that_says_of_which_model_it_is_is_refused_before_a_step(tmp_path: Path) -> None:
    file, job = tmp_path / "plan.json", ByHand(config(gpu_budget=1 << 40)).steps(6)
    save_plan(job.engine, file, model={"layers": 4, "experts": None, "fp8": "e4m3"})
    for model in ({"layers": 4, "experts": None, "tokens": 8}, {}, None):
        load_plan(ByHand(config(gpu_budget=1 << 40)).engine, file, model=model)
    message = (
        "^.*plan.json is of another model or layout: of {}, and this one has {}. Remove it, and a new one is made$"
    )
    for name, other, texts in (("layers", 6, ("layers 4", "6")), ("experts", 8, ("experts None", "8"))):
        with pytest.raises(ValueError, match=message.format(*texts)):
            load_plan(ByHand(config(gpu_budget=1 << 40)).engine, file, model={name: other})


def test_what_files_need_and_what_excludes_a_budget(tmp_path: Path) -> None:
    for engine in (OffloadEngine(config()), OffloadEngine(config(gpu_budget=1))):
        with pytest.raises(OffloadError, match="has no gpu_budget, or has not measured a step yet"):
            save_plan(engine, tmp_path / "plan.json")
        with pytest.raises(OffloadError, match="nothing to draw"):
            plot_budget(engine, tmp_path / "plan.png")
    with pytest.raises(OffloadError, match="call it before the first iteration"):
        load_plan(OffloadEngine(config()), tmp_path / "plan.json")
    settings = config(gpu_budget=1 << 30, policy=Planned())
    with pytest.raises(ValueError, match="activation_loading_horizon=2 and gpu_budget=1,073,741,824 of"):
        offload_wrapper(nn.Sequential(), 2, config=settings)
    with pytest.raises(ValueError, match="gpu_budget auto depends on the memory of a GPU, and there is none here"):
        OffloadEngine(config(gpu_budget="auto"))


def test_evaluations_with_gradients_are_no_steps() -> None:
    """Eight of them in a row, without `no_grad`, had ended the planning for good."""
    job = ByLayers(config(gpu_budget=1 << 40)).steps(3)
    for _ in range(12):
        job.model(torch.ones(ROWS, HIDDEN))
    assert job.steps(9).states[-1] is State.HOLD and job.controller.decider.chosen is not None
    assert job.moved[-1] == 0  # everything fits


def test_an_engine_that_is_dropped_leaves_no_hook_on_optimizers() -> None:
    before = len(torch_optimizer._global_optimizer_post_hooks)
    for _ in range(3):
        OffloadEngine(config(gpu_budget=1))
    gc.collect()
    assert len(torch_optimizer._global_optimizer_post_hooks) == before


# -- a GPU's allocator ------------------------------------------------------------------------------------------------

BASE = 1 << 20
"""Of all else that is allocated."""


class Allocator:
    """A GPU's allocator on the CPU: what the engine has resident, `base` more, and what it has ever reserved.

    Args:
        in_floor: bytes reserved in vain before the first step that is planned.
        of_steps: step by step from that one on; empty: as many.
    """

    before_trim = 0
    """More, until memory is returned for the first time."""
    outside = 0
    """Held besides by others."""

    def __init__(self, job: Job, in_floor: int = KIB, of_steps: tuple[int, ...] = (), base: int = BASE) -> None:
        self._gauge, self._controller = ResidentGauge(job.engine._store.counters), job.controller
        self._base, self._in_floor, self._of_steps = base, in_floor, of_steps or (in_floor,)
        self._reserved = self.num_trims = 0
        job.controller._last.gauge = self

    def peak_bytes(self) -> int:
        return self._base + self._gauge.peak_bytes()

    def reset(self) -> None:
        self.held_bytes()
        self._gauge.reset()

    def held_bytes(self) -> int:
        number = self._controller.num_planning_steps - 4
        wasted = self._in_floor if number < 0 else self._of_steps[min(number, len(self._of_steps) - 1)]
        self._reserved = max(self._reserved, self.peak_bytes() + wasted + self.before_trim * (not self.num_trims))
        return self._reserved + self.outside

    def outside_bytes(self) -> int:
        return self.outside

    def taken_bytes(self) -> int:
        return self._base + self._gauge.taken_bytes() + self.outside

    def total_bytes(self) -> int:
        return 1 << 30

    def trim(self) -> None:
        self._reserved, self.num_trims = 0, self.num_trims + 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gauge, name)  # it records no allocations


def on_gpu(budget: int, in_floor: int = KIB, *of_steps: int, base: int = BASE) -> tuple[ByHand, Allocator]:
    job = ByHand(config(gpu_budget=budget))
    return job, Allocator(job, in_floor, of_steps, base)


@pytest.mark.parametrize("before", [0, 10], ids=["", "much was reserved before"])
@pytest.mark.usefixtures("same_decision")
def test_what_is_reserved_and_not_allocated_counts(before: int) -> None:
    reference = all_kept(ByHand)
    most = max(reference.peaks)
    budget = BASE + KIB + round(0.7 * most)
    job, gauge = on_gpu(budget)
    gauge._reserved = before * (most + BASE)
    job.steps(8)
    assert_same_training(job, reference)
    assert job.states[-1] is State.HOLD
    assert job.summary.measured_peak_bytes <= job.summary.predicted_peak_bytes <= budget
    assert job.summary.kept_bytes > 0 and gauge.num_trims == 2  # with optimizer state, and what the floor had left
    assert job.controller.report()


@each_job
@pytest.mark.parametrize("case", ["fits", "hardly fits", "has differed"])
def test_a_job_that_fits_well_runs_without_groups_but_for_one_step_in_each_window(
    make: Make, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are threads here: with a 32nd more than it takes, a step might not fit."""
    monkeypatch.setattr("offload_engine._budget.idleness._GROWN", 9 / 8)
    reference = make(config(dry_run=True))
    most = BASE + max(make(config(dry_run=True)).steps(1).peaks)
    job = make(config(gpu_budget=most * 17 // 16 if case == "hardly fits" else most * 5 // 4, recompute="off"))
    job.controller._idleness.is_measured = True
    Allocator(job)
    with mock.patch.object(job.engine, "start_chunk", wraps=job.engine.start_chunk) as start_chunk:
        for number in range(9):
            start_chunk.reset_mock()
            for each in (job, reference):
                each.step(rows=ROWS * 17 // 16 if number == 0 and case == "has differed" else ROWS)
    assert job.states[-1] is State.HOLD and job.moved[-1] == 0
    assert_same_training(job, reference)
    is_idle = case == "fits"
    assert job.engine.is_idle == is_idle
    assert start_chunk.called == (make is not ByLayers or not is_idle)  # who opens groups in spite of it is served


def test_weights_are_read_before_a_step_without_groups_only_if_a_chunk_starts_in_it() -> None:
    """The device idles until that is over: with 12 layers, a millisecond."""
    job = ByHand(config(gpu_budget=1 << 30, recompute="off"))
    job.controller._idleness.is_measured = True
    Allocator(job)
    num_read = 0

    def weights() -> Iterator[torch.Tensor]:
        nonlocal num_read
        num_read += 1
        yield from job.model.parameters()

    job.steps(12)
    weight = next(job.model.parameters())
    job.engine.begin_iteration(job.actions(1), weights())
    assert job.engine.is_idle and num_read == 0
    assert job.engine._store.eligibility.read_movable(weight.detach()) is not None
    for _ in range(2):
        job.engine.start_chunk(ChunkKey(0, 0)).end_forward()
        assert num_read == 1 and job.engine._store.eligibility.read_movable(weight.detach()) is None
    job.engine.end_iteration()


def test_checkpoints_run_without_groups_as_well() -> None:
    job, reference = ByCheckpoints(config(gpu_budget=1 << 30)), ByCheckpoints(config(dry_run=True))
    job.controller._idleness.is_measured = True
    assert_same_training(job.steps(9, num_microbatches=1), reference.steps(9, num_microbatches=1))
    assert job.states[-1] is State.HOLD and job.controller.is_idle


def test_a_schedule_knows_its_chunks_in_steps_that_need_no_groups() -> None:
    """A step without groups had begun a chunk of its own, by which activations had grown: all was measured again."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        job = ByHand(config(dry_run=True))
        stage = PipelineStage(job.model, 0, 1, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 4, loss_fn=lambda y, t: (y - t).square().mean())
        handle = offload_schedule(schedule, config(gpu_budget=1 << 30, recompute="off"), group_bytes=1 << 16)
        job.engine, num_idle = handle.engine, 0
        job.controller._idleness.is_measured = True  # as on a GPU
        with mock.patch.object(job.engine, "start_chunk", wraps=job.engine.start_chunk) as start_chunk:
            for _ in range(12):
                start_chunk.reset_mock()
                schedule.step(torch.ones(ROWS, HIDDEN), target=torch.zeros(ROWS, HIDDEN))
                job._optimizer.step()
                assert start_chunk.call_count == (0 if job.engine.is_idle else 4)
                num_idle += job.engine.is_idle
        assert job.controller.state is State.HOLD and num_idle >= 4
        handle.remove()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("most", "are_alike"), [(640, True), (650, True), (651, False)])
def test_steps_are_alike_within_a_64th(most: int, are_alike: bool) -> None:
    idleness, fits = Idleness(is_measured=True), SimpleNamespace(num_moves=0, recomputed_bytes=0, held_bytes=32)
    chosen: Any = SimpleNamespace(best=fits)
    for saved in (640, 640, 640, 640, most):
        assert not idleness.allows(chosen, budget_bytes=33)
        idleness.note(saved)
    assert idleness.allows(chosen, budget_bytes=33) == are_alike
    assert not idleness.allows(chosen, budget_bytes=32), "a 32nd more would not fit"


def test_what_was_reserved_in_vain_before_optimizers_had_their_state_does_not_count() -> None:
    """At 32,768 tokens predictions were 4 GiB too high: the first steps had left as much in pieces."""
    most = most_of()
    job, gauge = on_gpu(1 << 40, 10 * KIB)
    gauge.before_trim = most
    job.steps(8)
    # Copies are threads: a step before may have held more at its peak than the measured one.
    assert 10 * KIB <= job.controller.decider.known.model.overhead_bytes < most // 4
    summary, expected = job.summary, job.controller._expected()  # what an error of memory tells
    assert summary.predicted_allocated_bytes == summary.measured_allocated_bytes == gauge.peak_bytes()
    assert (expected.groups + expected.other, expected.overhead) == (gauge.peak_bytes(), 10 * KIB)


def test_the_first_decision_leaves_a_part_of_what_the_floor_reserves_in_vain() -> None:
    """Fragments of a decision are not those of the floor: planned steps held 770 MiB more than their budget."""
    wasted = 100 * KIB
    budget = BASE + wasted + round(0.8 * most_of())
    job, gauge = on_gpu(budget + BASE, wasted, wasted * 5 // 4)
    gauge.outside = BASE
    while State.HOLD not in job.states:
        job.step()
    assert job.states[-3:] == [State.VERIFY, State.VERIFY, State.HOLD]  # no step was above, so nothing is corrected
    assert wasted > job.controller.decider.guard_bytes >= 3 * wasted // 10
    assert gauge.held_bytes() <= budget + BASE and job.controller.measured.held_bytes <= budget + BASE
    assert job.summary.predicted_peak_bytes == job.controller.measured.held_bytes


@pytest.mark.parametrize(
    ("halves", "num_verified"), [((1, 6, 2), 4), ((6, 2), 3)], ids=["in its second step", "in its first step"]
)
@pytest.mark.usefixtures("same_decision")
def test_a_decision_that_reserves_too_much_in_vain_is_corrected(halves: tuple[int, ...], num_verified: int) -> None:
    """The second step with a decision held 1,000 MiB more than the first: full segments had been split by then."""
    wasted = 100 * KIB
    budget = BASE + wasted + round(0.6 * most_of())
    job, gauge = on_gpu(budget, wasted, *(half * wasted // 2 for half in halves))
    job.steps(10)
    assert job.states[-1] is State.HOLD and job.states.count(State.VERIFY) == num_verified
    assert job.moved[3] < job.moved[-1] and gauge.held_bytes() <= budget


@pytest.mark.usefixtures("same_decision")
def test_a_peak_between_two_steps_changes_no_decision_and_growth_of_all_else_keeps_less() -> None:
    most = most_of()
    budget = BASE + KIB + round(0.8 * most)
    job, gauge = on_gpu(budget)
    job.steps(6)
    predicted = job.summary.predicted_peak_bytes
    gauge._base += 10 * most
    gauge.held_bytes()  # as an evaluation may have
    gauge._base -= 10 * most
    job.steps(2)
    assert gauge.num_trims == 3  # the first two are of the decision
    assert job.summary.predicted_peak_bytes == predicted
    gauge._base += most // 4
    job.steps(3)
    assert job.states[-1] is State.HOLD and job.moved[-1] > job.moved[5]
    assert gauge.held_bytes() <= budget


@pytest.mark.usefixtures("same_decision")
def test_what_each_step_reserves_in_vain_keeps_less_where_returning_it_does_not_help() -> None:
    """Else each step would be above the budget, and each would begin with an empty allocator."""
    budget = BASE + 20 * KIB + round(0.8 * most_of())
    job, gauge = on_gpu(budget, 10 * KIB)
    job.steps(8)
    assert job.states[-1] is State.HOLD and gauge.held_bytes() <= budget
    moved, num_trims = job.moved[-1], gauge.num_trims
    gauge._of_steps = (100 * KIB,)
    job.steps(6)
    assert job.moved[-1] > moved and gauge.num_trims >= num_trims + 2
    num_trims = gauge.num_trims
    job.steps(3)
    assert gauge.num_trims == num_trims and gauge.held_bytes() <= budget


def test_the_first_step_with_other_groups_is_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan knows them in it. The step before it is answered: its groups were known."""
    job, _ = on_gpu(1 << 40)
    job.steps(7)
    hold, in_force, answered = job.controller._hold, job.controller._in_force, list[bool]()
    monkeypatch.setattr("offload_engine._budget.controller._WINDOW_STEPS", 8)
    monkeypatch.setattr(hold, "use_what_is_left", lambda: setattr(in_force, "is_settled", False))
    monkeypatch.setattr(hold, "answer", lambda held_bytes, is_window_over: answered.append(is_window_over))
    job.steps(4)
    assert answered == [False, True, False]


@pytest.mark.parametrize("is_pipeline", [False, True])
def test_what_is_no_wait_for_copies_shrinks_with_the_step_if_other_ranks_run_other_chunks(
    is_pipeline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ByHand(config(gpu_budget=1 << 40))
    job.controller.decider.join(tuple, lambda numbers: tuple(max(0, n) for n in numbers), (0, 1 + is_pipeline))
    job.steps(3)
    decider = job.controller.decider
    monkeypatch.setattr(decider._context.device, "busy_ratio", 1.06)
    job.steps(1)
    known, chosen = decider.known, decider.chosen
    assert decider.expected_ratio == pytest.approx(1.03 if is_pipeline else 1.06)
    assert (known.costs.waited_ms is not None) == (chosen.pipeline_ms is not None) == is_pipeline
    job.steps(4)
    assert (decider.chosen.pipeline_ms is not None) == is_pipeline and job.states[-1] is State.HOLD


def test_a_slow_step_that_verifies_corrects_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be delayed. The shortest of three that hold does."""
    job = ByHand(config(gpu_budget=1 << 40))
    controller, corrected = job.controller, list[float]()
    monkeypatch.setattr(controller.decider, "correct_time", corrected.append)
    job.steps(4)
    monkeypatch.setattr(controller._last, "measure", lambda: setattr(controller._last, "milliseconds", 1e6))
    while controller.state is not State.HOLD:
        job.steps(1)
    assert corrected == []
    job.steps(3)
    assert corrected == [1e6]


@pytest.mark.usefixtures("same_decision")
def test_every_rank_agrees_as_often_whatever_befalls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one would wait for the others for ever. What befalls one rank is answered by all when a window is over."""
    monkeypatch.setattr("offload_engine._budget.controller._WINDOW_STEPS", 5)
    most, sizes = most_of(), []
    for more, rows in ((0, ROWS), (most // 4, ROWS), (0, ROWS * 3 // 2)):
        job, gauge = on_gpu(BASE + KIB + round(0.8 * most))
        said: list[int] = []
        job.controller.decider.agree = lambda numbers, said=said: said.append(len(numbers)) or numbers
        job.steps(6)
        gauge._base += more
        job.steps(3, rows=rows)
        assert job.states[-1] is State.HOLD
        sizes.append(said)
    assert sizes[0] and sizes[0] == sizes[1] == sizes[2]


def test_what_all_ranks_decide_together_is_replayed_if_they_know_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay is agreed upon, so a rank that decides alone has none, or it would wait for the others for ever."""
    job, _ = on_gpu(1 << 40)
    decider, more, agreed_by = job.controller.decider, 0, list[Any]()
    decider.agree = lambda numbers: tuple(number + more for number in numbers)
    job.steps(6)
    chosen = decider.chosen

    def choose(*_: Any, agree: Any, **others: Any) -> Any:
        agreed_by.append(agree)
        return chosen

    monkeypatch.setattr(decider.known, "choose", choose)
    decider.reconsider()
    decider._decisions.clear()
    decider.decide(is_alone=True)
    more = 1  # the other ranks have other numbers
    decider.reconsider()
    assert agreed_by == [decider.agree, None, None]


# -- auto -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("more", "margin"), [(0, 2 << 30), (900 << 20, 2 << 30), (3 << 30, 6 << 30)])
def test_auto_leaves_twice_what_varies_outside_the_allocator(
    more: int, margin: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the third step so much more is held there; in the first it loads libraries. What is cached does not count."""
    outside, cached = [0], [0]
    monkeypatch.setattr(ResidentGauge, "total_bytes", lambda self: 128 << 30)
    monkeypatch.setattr(ResidentGauge, "outside_bytes", lambda self: outside[0])
    monkeypatch.setattr(ResidentGauge, "held_bytes", lambda self: self.peak_bytes() + outside[0] + cached[0])
    job = ByHand(config(gpu_budget="auto"))
    for outside[0], cached[0] in ((9 << 30, 0), (0, 5 << 30), (more, 0), (0, 0), (0, 0), (0, 0)):
        job.step()
    assert job.summary.budget_bytes == (128 << 30) - margin


# -- out of memory ----------------------------------------------------------------------------------------------------


def run_out(job: Job, before: Callable[[], None] = lambda: None) -> str:
    """Run out of memory in the third layer of a step; return what is noted on the error."""

    def fail(*_: object) -> None:
        before()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    hook = job.model[2][0].register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        job.step()
    hook.remove()
    return "".join(getattr(caught.value, "__notes__", []))


def test_running_out_of_memory_says_what_was_expected_and_what_has_grown() -> None:
    job, gauge = on_gpu((4 << 30) + most_of(), base=4 << 30)

    def reserve_in_vain() -> None:
        gauge._reserved = gauge.held_bytes() + (2 << 30)

    assert "and nothing was planned yet: everything was being offloaded" in run_out(job)
    job.steps(8)
    note = run_out(job, reserve_in_vain)
    groups = job.controller.decider.chosen.best.resident_bytes
    assert note.startswith(
        f"gpu_budget is 4.00 GiB, and the plan expected 4.00 GiB at the most: {short_size(groups)} of groups"
    )
    assert "What is reserved in vain or outside torch has grown the most, by 2.00 GiB: fragments" in note
    assert job.steps(1).states[-1] is State.HOLD
    gauge._base += 3 << 30
    assert "All else that is allocated has grown the most, by 3.00 GiB: weights, gradients" in run_out(job)
    by_layers = ByLayers(config(gpu_budget=1 << 40)).steps(6)
    assert "so the budget is more than this GPU has free" in run_out(by_layers)
    assert run_out(ByLayers(config())) == ""


class Wasteful(Allocator):
    """Reserves in vain a tenth of the bytes of groups that stay, which no model knows of."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._counters = job.engine._store.counters

    def held_bytes(self) -> int:
        stats = self._counters.stats
        wasted = KIB + round(0.1 * max(0, stats.managed_bytes - stats.copied_out_bytes))
        self._reserved = max(self._reserved, self.peak_bytes() + wasted)
        return self._reserved


def test_a_wrong_model_is_corrected_at_most_three_times() -> None:
    reference = all_kept(ByHand)
    budget = BASE + KIB + round(0.8 * max(reference.peaks))
    job = ByHand(config(gpu_budget=budget))
    gauge = Wasteful(job)
    job.steps(10)
    assert_same_training(job, reference)
    assert job.states[-1] is State.HOLD and State.HOLD in job.states[:8]
    model = job.controller.decider.known.model
    assert 3 <= gauge.num_trims <= 5 and model.overhead_bytes > model.wasted_bytes  # which were the same at first
    assert gauge.held_bytes() <= budget
