# SPDX-License-Identifier: Apache-2.0
"""Ranks of a stage decide alike within a budget, whatever befalls one of them; an error of one ends all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state as ps

from megatron_patches import Handle, apply
from offload_engine._budget.state import State
from offload_engine.errors import BudgetError
from tests.dist.budgets import Skewed, ends, gathered, optimizer_of
from tests.dist.launch import Pipeline, on_ranks
from tests.dist.tiny import ALL, engine_of, fingerprint, make_chunks, make_config, run, step

NUM_STEPS = 8
DATA, TENSOR, CONTEXT, STAGES = Pipeline(), Pipeline(tensor=2), Pipeline(context=2), Pipeline(2)
DATA_OR_STAGES = pytest.mark.parametrize("shape", [DATA, STAGES], ids=["data", "pipeline"])
BUDGET_BYTES = "megatron_patches._runtime.budget_bytes"


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
        found = fingerprint(self.chunks, run(self.chunks, 2, **more))
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
                is_skipped = number == at and is_last_rank()
                with pytest.raises(ZeroDivisionError) if is_skipped else nullcontext():
                    job.step(**({"forward_step": lambda *_: 1 / 0} if is_skipped else {}))
                torch.distributed.barrier()  # as gradients are summed: a rank cannot be a step ahead
            assert job.view.state is State.HOLD
            first, second = job.decisions()
            assert first == second


@DATA_OR_STAGES
@on_ranks(world_size=2)
def test_a_plan_that_only_one_rank_has_is_not_used(shape: Pipeline, tmp_path: Path) -> None:
    own, away, found = tmp_path / "plan_rank1.json", tmp_path / "away", []
    for num_steps, old, new in ((6, own, away), (1, away, own), (1, None, None)):
        with training(plan=tmp_path / "plan.json") as job:
            job.steps(num_steps)
            found.append(job.view.state)
        if is_last_rank() and old is not None:
            old.rename(new)
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


@pytest.mark.parametrize(
    ("group", "reason", "told_others"),
    [
        (None, "it has no group 0 1 mlp_fc2 0 (stage, layer,", "another rank rejects"),
        (
            '[0, 7, "mlp_fc2"',
            "it has a group 0 7 mlp_fc2 0",
            "pipeline rank 1: --offload-plan",
        ),  # before the first step
    ],
    ids=["no group", "another layout"],
)
@on_ranks(STAGES, timeout_s=30)
def test_a_plan_of_another_model_on_one_rank_ends_all(
    group: str | None, reason: str, told_others: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan_rank1.json"
    with training(plan=tmp_path / "plan.json") as job:
        job.steps(6)
    if is_last_rank():
        lines, old = path.read_text().splitlines(), '[0, 1, "mlp_fc2"'
        path.write_text("\n".join(line.replace(old, group or "") for line in lines if group or old not in line))
    with training(plan=tmp_path / "plan.json") as job, pytest.raises(ValueError) as caught:
        job.steps(3)
    errors = gathered(str(caught.value))
    assert f"--offload-plan {path} is of another model or layout: {reason}" in errors[1]
    assert told_others in errors[0]


@on_ranks(STAGES, timeout_s=30)
def test_a_budget_on_some_stages_only_is_refused() -> None:
    given = {} if is_last_rank() else {"offload_gpu_budget": "1GiB"}
    with (
        apply(ALL, has_report=False),
        pytest.raises(ValueError, match="is set on some ranks.*, but not on 1: set it on"),
    ):
        run(make_chunks(make_config(**given)), 4)
