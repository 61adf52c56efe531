# SPDX-License-Identifier: Apache-2.0
"""Training within a budget of bytes: the same bits, and no more on the device than the budget, in every layout.

What does not fit is moved, or recomputed where that is shorter, alike on the ranks of a stage, whatever befalls one of
them; an error of one ends all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state as ps

from megatron_patches import Handle, apply
from megatron_patches._model.candidates import find_candidates
from megatron_patches._model.gpu_budget import budget_of
from offload_engine import OffloadConfig, OffloadEngine
from offload_engine._budget.learn import learned
from offload_engine._budget.state import State
from offload_engine.errors import BudgetError
from offload_engine.planning.clocks import Link
from offload_engine.sizes import parse_size
from tests.dist.launch import Pipeline, on_ranks
from tests.dist.settings import DEEP, OVERLAP, SHARED, full, selective
from tests.dist.test_recompute_switches import MODELS, _config, _step
from tests.dist.tiny import ALL, engine_of, gathered, make_chunks, make_config, run, stats_of, step, train_distributed

NUM_STEPS = 8
NUM_FREE = 5
"""Steps before the third that goes by a plan, at most: later ones are within the budget."""


class Skewed:
    """A gauge of a device on which all else takes `extra` bytes more."""

    def __init__(self, gauge: Any, extra: int) -> None:
        self._gauge = gauge
        self.extra = extra

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._gauge, name)
        return (lambda: found() + self.extra) if name in ("peak_bytes", "held_bytes", "outside_bytes") else found


def optimizer_of(*models: Sequence[torch.nn.Module]) -> torch.optim.Optimizer:
    """Return one that changes nothing; a budget waits for its first step."""
    return torch.optim.SGD([p for chunks in models for chunk in chunks for p in chunk.parameters()], lr=0.0)


class Trained(NamedTuple):
    """The peak of each step, and what the engine has decided by."""

    peaks: list[int]
    view: Any


def train(
    make: Callable[[], list[Any]],
    microbatches: Sequence[int],
    expected: Mapping[int, dict[str, str]],
    step: Callable[[list[Any], int], dict[str, str]] = step,
) -> Trained:
    """Compare the steps of a model with those without offload at these numbers of microbatches; evaluate in between."""
    peaks: list[int] = []
    with apply(ALL, has_report=False) as handle:
        optimizer = optimizer_of(chunks := make())
        for number in microbatches:
            assert step(chunks, number) == expected[number], number
            optimizer.step()
            peaks.append(stats_of(handle).peak_resident_bytes)
            if len(peaks) % 3 == 1:
                run(chunks, number, forward_only=True)
        return Trained(peaks, engine_of(handle).budget)


def ends(view: Any) -> tuple[int, int]:
    """Return what is predicted with everything offloaded, and with nothing moved."""
    chosen = view.decider.chosen
    return chosen.floor.held_bytes, chosen.top.held_bytes


@pytest.mark.parametrize("shape", [Pipeline(2), DEEP], ids=["1F1B, other microbatches", "interleaved, overlap"])
@on_ranks(timeout_s=240.0)
def test_steps_are_the_same_and_within_the_budget(shape: Pipeline) -> None:
    kind, dtype, numbers = ("dense", torch.float32, [4, 4, 4, 4, 4, 2, 6, 4])
    settings: dict[str, Any] = {}
    if shape == DEEP:
        kind, dtype, numbers, settings = "moe", torch.bfloat16, [4] * NUM_STEPS, {**SHARED, **OVERLAP}
    reference = make_chunks(make_config(kind, dtype, **settings))
    expected = {number: step(reference, number) for number in set(numbers)}

    def within(budget: str, numbers: list[int]) -> Trained:
        offload = {**settings, "offload_gpu_budget": budget}
        return train(lambda: make_chunks(make_config(kind, dtype, **offload)), numbers, expected)

    whole = within("1TiB", [4] * 6)
    floor, top = ends(whole.view)
    assert whole.view.decider.is_alone == (shape != DEEP), "one rank of a stage agrees with no other one"
    assert floor == top or whole.peaks[0] < whole.peaks[-1]  # everything leaves until it has decided, and nothing then
    budget = half_way(floor, top)
    found = within(f"{budget}", numbers)
    assert max(found.peaks[NUM_FREE:]) <= budget and found.view.state in (State.HOLD, State.VERIFY), found


def half_way(floor: int, top: int) -> int:
    """Return what is half-way from everything offloaded to nothing moved, on the rank that takes the most."""
    return sum(map(max, zip(*gathered((floor, top)), strict=True))) // 2


@on_ranks(world_size=2, timeout_s=240.0)
def test_the_distributed_optimizer() -> None:
    def steps(**budget: str) -> list[tuple[dict[str, str], int]]:
        config = make_config("dense", torch.bfloat16, **budget)

        def counted(chunks: list[Any]) -> tuple[dict[str, str], int]:
            return step(chunks, 4), 0 if handle.stats is None else handle.stats.peak_resident_bytes

        return train_distributed(config, make_chunks(config), counted, NUM_STEPS)

    with apply(ALL, has_report=False) as handle:
        expected, kept = steps(), steps(offload_gpu_budget="1TiB")
        floor, top = kept[0][1], kept[-1][1]
        budget = half_way(floor, top)
        within = steps(offload_gpu_budget=f"{budget}")
    assert [found for found, _ in within] == [found for found, _ in kept] == [found for found, _ in expected]
    assert max(peak for _, peak in within[NUM_FREE:]) <= budget and floor < top


@on_ranks()
def test_what_a_model_offers() -> None:
    dense, _ = _candidates("dense")
    assert dense == (
        "layer_input", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2",
    )  # fmt: skip
    names, left_out = _candidates("moe", **SHARED)
    assert {"experts", "shared_experts", "router", "dispatched_tokens"} <= set(names)
    assert left_out["self_attn"] == "its parts move separately"
    assert left_out["router_fc1"] == left_out["shared_fc1"] == "it moves as a part of another name"
    names, left_out = _candidates("mixed", **selective("mlp", "layernorm"))
    assert "mlp_act" not in names and "recompute_modules has 'mlp'" in left_out["mlp_act"]
    names, left_out = _candidates("mixed", **full())
    assert names == ("layer_input",) and "recomputes every layer" in left_out["core_attn"]
    config = make_config("moe")
    config.moe_paged_stash = True
    names, left_out = find_candidates(config, make_chunks(make_config("moe")), True)
    assert "experts" not in names and "moe_paged_stash" in left_out["experts"]


def _candidates(kind: str, **settings: object) -> tuple[tuple[str, ...], dict[str, str]]:
    config = make_config(kind, **settings)
    return find_candidates(config, make_chunks(config), has_budget=True)


@on_ranks()
def test_only_the_names_given_are_candidates() -> None:
    with apply(ALL, gpu_budget="1GiB", modules=["mlp_act"]) as handle:
        chunks = make_chunks(make_config())
        run(chunks, 2)
        assert stats_of(handle).num_groups == 8
    with apply(ALL, gpu_budget="50%"):
        with pytest.raises(ValueError, match="--offload-gpu-budget 50% depends on the memory of a GPU"):
            run(make_chunks(make_config()), 2)


def test_a_budget_on_a_gpu() -> None:
    """What the allocator has cached does not count: steps use it."""
    size, taken, cached = 80 << 30, 5 << 30, 3 << 30
    values = {"mem_get_info": (size - taken - cached, size), "memory_reserved": cached + 2, "memory_allocated": 2}
    gpu = {name: mock.Mock(return_value=value) for name, value in {"is_available": True, **values}.items()}
    with mock.patch.multiple(torch.cuda, **gpu):
        for budget, expected in (("60GiB", 60 << 30), ("75%", 60 << 30), ("auto", "auto")):  # auto is to be measured
            assert budget_of(parse_size(budget)) == expected
        for budget, message in (
            ("81GiB", "^--offload-gpu-budget 81GiB is above the 80.00 GiB of the GPU: lower it, or give auto$"),
            ("5%", "^--offload-gpu-budget 5% is 4.00 GiB, but 5.00 GiB are taken before the first step, by .* raise"),
        ):
            with pytest.raises(ValueError, match=message):
                budget_of(parse_size(budget))


# -- recomputation -----------------------------------------------------------------------------------------------------

NUM_RECOMPUTING = 10
NUM_MICROBATCHES = 2
DECIDE = "offload_engine._budget.decide"


@contextmanager
def where_the_link_is_behind() -> Iterator[None]:
    """All but copies takes no time: times of tiny models are left to chance."""
    with mock.patch(f"{DECIDE}.measure_link", return_value=Link(1e-6, 1e-6)):
        with mock.patch(f"{DECIDE}.agreed_numbers", return_value=[2e6, 0.0]):
            with mock.patch(f"{DECIDE}.learned", lambda *args: learned(*args)._replace(waited_ms=2e6)):
                yield


def _recomputing(model: str, **more: Any) -> list[Any]:
    kind, settings, _ = MODELS[model]
    size = ps.get_tensor_model_parallel_world_size()
    return make_chunks(_config(kind, {**settings, "tensor_model_parallel_size": size, **more}))


def _train(model: str, budget: str, expected: dict[str, str], num_steps: int = NUM_RECOMPUTING, **more: Any) -> Trained:
    make, numbers = partial(_recomputing, model, offload_gpu_budget=budget, **more), [NUM_MICROBATCHES] * num_steps
    return train(make, numbers, {NUM_MICROBATCHES: expected}, _step)


def _half_way(model: str, expected: dict[str, str]) -> int:
    whole = _train(model, "1TiB", expected, num_steps=6)
    assert whole.view.summary.recomputed_bytes == 0
    return half_way(*ends(whole.view))


@pytest.mark.parametrize("shape", [Pipeline(2), Pipeline(tensor=2), DEEP], ids=["dense", "spread", "experts"])
@on_ranks(timeout_s=240.0)
def test_what_is_recomputed_is_chosen_and_steps_are_the_same(shape: Pipeline) -> None:
    model = {Pipeline(2): "dense", DEEP: "experts"}.get(shape, "spread")
    expected = _step(_recomputing(model), NUM_MICROBATCHES)
    budget = _half_way(model, expected)
    with where_the_link_is_behind():
        peaks, view = _train(model, f"{budget}", expected)
    best = view.decider.chosen.best
    recomputed = best.decision.choices.recomputed
    assert max(peaks[-3:]) <= budget and bool(view.summary.recomputed_bytes) == bool(recomputed)
    assert sum(best.recomputed_bytes.values()) == view.summary.recomputed_bytes
    chosen = gathered((ps.get_pipeline_model_parallel_rank(), recomputed))
    assert any(of_rank for _, of_rank in chosen)
    assert all(of_rank == dict(chosen)[stage] for stage, of_rank in chosen)


@on_ranks(Pipeline(2), timeout_s=240.0)
def test_a_plan_is_written_drawn_and_given_back_unless_it_recomputes_what_may_not_be(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files: dict[str, Any] = {"offload_plan": f"{tmp_path}/plan.json", "offload_plan_plot": f"{tmp_path}/plan.png"}
    expected = _step(_recomputing("dense"), NUM_MICROBATCHES)
    budget = _half_way("dense", expected)
    with where_the_link_is_behind():
        peaks = _train("dense", f"{budget}", expected, **files).peaks
        forbidden = _train("dense", f"{budget}", expected, offload_recompute="off").view
    assert not forbidden.decider.chosen.best.decision.choices.recomputed
    torch.distributed.barrier()
    assert {path.name for path in tmp_path.iterdir()} == {"plan_rank0.json", "plan_rank1.json", "plan.png"}
    again, view = _train("dense", f"{budget}", expected, num_steps=3, **files)
    assert view.decider.chosen is None  # nothing was measured
    assert any(gathered(view.decider.saved.allowance.choices.recomputed))
    assert again[-1] == peaks[-1]
    assert view.summary.measured_step_ms > 0 and "Budget: the whole step" in view.report()
    with pytest.raises(
        ValueError, match=r"^--offload-plan \S+ is of another model or layout: of ffn_hidden_size \d+, and"
    ):
        _train("dense", f"{budget}", expected, ffn_hidden_size=48, **files)
    with pytest.raises(ValueError, match=r"--offload-plan \S+ recomputes, which --offload-recompute off forbids"):
        _train("dense", f"{budget}", expected, offload_recompute="off", **files)
    with pytest.raises(ValueError, match="--offload-plan .*/nowhere/plan.json: there is no directory"):
        _train("dense", f"{budget}", expected, offload_plan=f"{tmp_path}/nowhere/plan.json")
    with pytest.raises(ValueError, match="--offload-plan-plot .* is a directory: give a file in it"):
        _train("dense", f"{budget}", expected, offload_plan_plot=f"{tmp_path}")


@on_ranks(Pipeline(tensor=2), timeout_s=240.0)
def test_a_rank_above_its_budget_changes_nothing_that_others_recompute_too() -> None:
    expected, found = _step(_recomputing("dense"), NUM_MICROBATCHES), list[Any]()
    budget = _half_way("dense", expected)
    with where_the_link_is_behind(), apply(ALL) as handle:
        chunks = _recomputing("dense", offload_gpu_budget=f"{budget}")
        optimizer = optimizer_of(chunks)
        for number in range(NUM_RECOMPUTING + 2):
            assert _step(chunks, NUM_MICROBATCHES) == expected
            optimizer.step()
            view: Any = engine_of(handle).budget
            if number == NUM_RECOMPUTING - 1:
                view._last.gauge = Skewed(view._last.gauge, budget // 4 if torch.distributed.get_rank() else 0)
            if number >= NUM_RECOMPUTING - 1:
                found += gathered(view.decider.chosen.best.decision.choices.recomputed)
    assert found[0] and all(each == found[0] for each in found)


def test_an_engine_without_other_ranks_recomputes_nothing() -> None:
    engine = OffloadEngine(OffloadConfig(gpu_budget=1 << 30))
    assert engine.budget is not None and engine.budget.decider.find_options(()) == ()
    engine.close()


# -- ranks of a stage decide alike -------------------------------------------------------------------------------------

DATA, TENSOR, CONTEXT, STAGES = Pipeline(), Pipeline(tensor=2), Pipeline(context=2), Pipeline(2)
DATA_OR_STAGES = pytest.mark.parametrize("shape", [DATA, STAGES], ids=["data", "pipeline"])
BUDGET_BYTES = "megatron_patches._runtime.budget_of"


def is_last_rank() -> bool:
    return torch.distributed.get_rank() == torch.distributed.get_world_size() - 1


class Job:
    """A tiny model that trains within a budget; on one rank all else takes more."""

    def __init__(self, handle: Handle, budget: int) -> None:
        self._handle = handle
        settings: Any = {"tensor_model_parallel_size": ps.get_tensor_model_parallel_world_size()}
        has_stages = ps.get_pipeline_model_parallel_world_size() > 1
        self.is_skewed = is_last_rank() is not has_stages  # the first stage has more to move
        self.reference = make_chunks(make_config(**settings))
        self.chunks = make_chunks(make_config(**settings, offload_gpu_budget=str(budget)))
        self._optimizer = optimizer_of(self.chunks)
        self.num_steps = 0

    @property
    def view(self) -> Any:
        return engine_of(self._handle).budget

    def step(self, extra: int = 0, **more: Any) -> dict[str, str]:
        found = step(self.chunks, 2, **more)
        self._optimizer.step()
        self.num_steps += 1
        if not isinstance(self.view._last.gauge, Skewed):
            self.view._last.gauge = Skewed(self.view._last.gauge, 0)
        self.view._last.gauge.extra = extra if self.is_skewed else 0
        return found

    def steps(self, number: int, extra: int = 0) -> None:
        for _ in range(number):
            self.step(extra)

    def decisions(self) -> list[str]:
        """What was decided on each rank: the same on ranks that decide alike."""
        choices, room = self.view.decider.chosen.best.decision
        return gathered(f"{sorted(choices.kept)} {sorted(choices.recomputed)} {room}")


@contextmanager
def training(budget: int = 1 << 30, plan: Path | None = None) -> Iterator[Job]:
    with apply(ALL, has_report=False, plan=None if plan is None else str(plan)) as handle:
        yield Job(handle, budget)


def _ends() -> tuple[int, int]:
    with training(1 << 40) as job:
        job.steps(6)
        return ends(job.view)


@pytest.mark.parametrize("shape", [TENSOR, CONTEXT, STAGES], ids=["tensor", "context", "pipeline"])
@on_ranks(world_size=2)
def test_ranks_with_unequal_room_keep_the_same(shape: Pipeline) -> None:
    floor, top = _ends()
    budget = 2 * max(gathered(top))
    with training(budget) as job:
        expected, states = step(job.reference, 2), []
        for _ in range(NUM_STEPS):
            assert job.step(extra=budget - top + (top - floor) // 2) == expected
            states.append(job.view.state)
        assert states[-1] is State.HOLD and job.view.measured.held_bytes <= budget
        assert job.view.decider.chosen.best.num_moves or not job.is_skewed
        first, second = zip(job.decisions(), gathered(states), strict=True)
    if shape == STAGES:  # each has memory of its own
        assert first[0] != second[0]
    else:
        assert first == second


@on_ranks(TENSOR)
def test_a_rank_above_its_budget_keeps_less_at_once_and_all_do_when_a_window_is_over() -> None:
    floor, top = _ends()
    budget, found = 2 * top, []
    with mock.patch("offload_engine._budget.controller._WINDOW_STEPS", 10), training(budget) as job:
        for number in range(1, 13):
            job.step(extra=0 if number < 7 else budget - top + (top - floor) // 2)
            if number in (6, 10, 12):
                found.append(job.decisions())
        assert job.view.state is State.HOLD
    (before, same), (first, second), (after, as_well) = found
    assert first != second
    assert before == same != after == as_well


@DATA_OR_STAGES
@on_ranks(world_size=2)
def test_the_smallest_budget_of_a_stage_is_that_of_all(shape: Pipeline) -> None:
    with mock.patch(BUDGET_BYTES, lambda size: 1 << (29 if is_last_rank() else 30)), training() as job:
        job.step()
        assert gathered(job.view.decider.budget_bytes) == [1 << (30 if shape == STAGES else 29), 1 << 29]


@on_ranks(DATA, world_size=2)
def test_a_step_that_one_rank_skips_leaves_no_other_waiting() -> None:
    """Before all is measured, in the measured step, and when that is verified."""
    for at in (1, 3, 5):
        with training() as job:
            for number in range(NUM_STEPS + 2):
                fails: dict[str, Any] = {"forward_step": lambda *_: 1 / 0} if number == at and is_last_rank() else {}
                with pytest.raises(ZeroDivisionError) if fails else nullcontext():
                    job.step(**fails)
                torch.distributed.barrier()  # as gradients are summed: a rank cannot be a step ahead
            assert job.view.state is State.HOLD
            first, second = job.decisions()
            assert first == second


@DATA_OR_STAGES
@on_ranks(world_size=2)
def test_a_plan_that_only_one_rank_has_is_not_used(shape: Pipeline, tmp_path: Path) -> None:
    own, away, found = tmp_path / "plan_rank1.json", tmp_path / "away", []
    for num_steps, moved in ((6, (own, away)), (1, (away, own)), (1, ())):
        with training(plan=tmp_path / "plan.json") as job:
            job.steps(num_steps)
            found.append(job.view.state)
        if is_last_rank() and moved:
            moved[0].rename(moved[1])
        torch.distributed.barrier()
    assert found[1:] == [State.FLOOR, State.HOLD]


# -- errors of one rank: all end sooner than a rank gives up waiting for another ---------------------------------------


@DATA_OR_STAGES
@on_ranks(world_size=2, timeout_s=30)
def test_a_budget_below_the_floor_of_one_rank_ends_all(shape: Pipeline) -> None:
    with training(64 << 20) as job:
        with pytest.raises(BudgetError, match="gpu_budget is") as caught:
            job.steps(NUM_STEPS, extra=64 << 20)
        assert job.num_steps == 4  # measured twice: what the allocator had before must not count
        if shape == DATA or job.is_skewed:
            assert "less than the" in str(caught.value) and "Raise the budget" in str(caught.value)
        else:
            assert "another rank, which says by how much" in str(caught.value)


@pytest.mark.parametrize("shape", [TENSOR, STAGES], ids=["tensor", "pipeline"])
@on_ranks(timeout_s=30)
def test_a_rank_that_cannot_begin_ends_all(shape: Pipeline) -> None:
    def refuse(size: Any) -> int:
        if is_last_rank():
            raise ValueError("the GPU is taken")
        return 1 << 30

    with mock.patch(BUDGET_BYTES, refuse), training() as job:
        with pytest.raises(ValueError) as caught:
            job.step()
    errors = gathered(str(caught.value))
    assert errors[-1].endswith("the GPU is taken")
    assert shape == STAGES or "another rank of this pipeline stage cannot begin; see its error" in errors[0]


@on_ranks(STAGES)
def test_a_plan_of_another_model_on_one_rank_ends_all(tmp_path: Path) -> None:
    path, old = tmp_path / "plan_rank1.json", '[0, 1, "mlp_fc2"'
    with training(plan=tmp_path / "plan.json") as job:
        job.steps(6)
    torch.distributed.barrier()
    lines = path.read_text().splitlines()
    without, other = (
        [line for line in lines if old not in line],
        [line.replace(old, '[0, 7, "mlp_fc2"') for line in lines],
    )
    for changed, reason, told_others in (
        (without, "it does not name a group (stage 0, layer 1, mlp_fc2, part 0), and has", "another rank rejects"),
        (
            other,
            "it names a group that is not here (stage 0, layer 7, mlp_fc2, part 0), and",
            "pipeline rank 1: --offload-plan",
        ),  # before the first step
    ):
        torch.distributed.barrier()
        if is_last_rank():
            path.write_text("\n".join(changed))
        with training(plan=tmp_path / "plan.json") as job, pytest.raises(ValueError) as caught:
            job.steps(3)
        errors = gathered(str(caught.value))
        assert f"--offload-plan {path} is of another model or layout: {reason}" in errors[1]
        assert told_others in errors[0]


@on_ranks(STAGES, timeout_s=30)
def test_a_budget_on_some_stages_only_is_refused() -> None:
    given = {} if is_last_rank() else {"offload_gpu_budget": "1GiB"}
    refused = pytest.raises(ValueError, match="is set on some ranks.*, but not on 1: set it on")
    with apply(ALL, has_report=False), refused:
        run(make_chunks(make_config(**given)), 4)
