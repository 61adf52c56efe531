# SPDX-License-Identifier: Apache-2.0
"""Ranks of a stage decide alike within a budget, whatever befalls one of them; an error of one ends all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state as ps

from megatron_patches import Handle, apply
from offload_engine._budget.state import State
from offload_engine.errors import BudgetError
from tests.dist.budgets import Skewed, ends, largest, optimizer_of
from tests.dist.launch import Pipeline, run_ranks
from tests.dist.tiny import ALL, engine_of, fingerprint, make_chunks, make_config, run, step

NUM_STEPS = 8
SHAPES = {
    "tensor": Pipeline(tensor=2),
    "data": Pipeline(),
    "context": Pipeline(context=2),
    "pipeline": Pipeline(2),
}


class Job:
    """A tiny model that trains within a budget; on one rank all else takes more."""

    def __init__(self, name: str, handle: Handle, budget: int = 1 << 30) -> None:
        self._handle = handle
        settings: Any = {"tensor_model_parallel_size": ps.get_tensor_model_parallel_world_size()}
        self.is_skewed = is_last_rank() is not (name == "pipeline")  # its first stage has more to move
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

    @property
    def decision(self) -> str:
        """What was decided: the same on ranks that decide alike."""
        choices, room = self.view.decider.chosen.best.decision
        return f"{sorted(choices.kept)} {sorted(choices.recomputed)} {room}"


def is_last_rank() -> bool:
    return torch.distributed.get_rank() == torch.distributed.get_world_size() - 1


def on_both(fn: Callable[..., Any], name: str, *args: Any, timeout_s: float = 90.0) -> list[Any]:
    """Run on two ranks; return what each does."""
    return run_ranks(fn, name, *args, world_size=2, pipeline=SHAPES[name], timeout_s=timeout_s)


def errors_of(fn: Callable[..., str], name: str, *args: Any) -> list[str]:
    """Return how the run of each rank ends, sooner than a rank gives up waiting for another."""
    return on_both(fn, name, *args, timeout_s=30.0)


@contextmanager
def training(name: str, budget: int = 1 << 30, plan: str | None = None) -> Iterator[Job]:
    with apply(ALL, has_report=False, plan=plan) as handle:
        yield Job(name, handle, budget)


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "data"])  # "context" agrees over the same group
def test_ranks_with_unequal_room_keep_the_same(name: str) -> None:
    found = on_both(_with_unequal_room, name)
    if name == "pipeline":  # each stage has memory of its own
        assert found[0][0] != found[1][0]
    else:
        assert found[0] == found[1]


def _ends(name: str) -> tuple[int, int]:
    with training(name, 1 << 40) as job:
        job.steps(6)
        return ends(job.view)


def _with_unequal_room(name: str) -> tuple[str, list[str]]:
    floor, top = _ends(name)
    (highest,) = largest(top)
    budget = 2 * highest
    with training(name, budget) as job:
        states: list[Any] = []
        expected = step(job.reference, 2)
        for _ in range(NUM_STEPS):
            assert job.step(extra=budget - top + (top - floor) // 2) == expected
            states.append(job.view.state)
        assert states[-1] is State.HOLD and job.view.measured.held_bytes <= budget
        assert job.view.decider.chosen.best.num_moves or not job.is_skewed
        return job.decision, [state.name for state in states]


def test_a_rank_above_its_budget_keeps_less_at_once_and_all_do_when_a_window_is_over() -> None:
    first, second = on_both(_grow, "tensor")
    assert first[1] != second[1]
    assert first[0] == second[0] != first[2] == second[2]


def _grow(name: str) -> list[str]:
    floor, top = _ends(name)
    budget, found = 2 * top, []
    with mock.patch("offload_engine._budget.controller._WINDOW_STEPS", 10), training(name, budget) as job:
        for number in range(1, 13):
            job.step(extra=0 if number < 7 else budget - top + (top - floor) // 2)
            if number in (6, 10, 12):
                found.append(job.decision)
        assert job.view.state is State.HOLD
    return found


def test_the_smallest_budget_of_a_stage_is_that_of_all() -> None:
    assert on_both(_budget_of_rank, "data") == [1 << 29, 1 << 29]
    assert on_both(_budget_of_rank, "pipeline") == [1 << 30, 1 << 29]


def _budget_of_rank(name: str) -> int:
    def budget_bytes(size: Any) -> int:
        return 1 << (29 if is_last_rank() else 30)

    with mock.patch("megatron_patches._runtime.budget_bytes", budget_bytes), training(name) as job:
        job.step()
        return job.view.decider.budget_bytes


@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_step_that_one_rank_skips_leaves_no_other_waiting(at: int) -> None:
    """Its number says in which state: before all is measured, in the measured step, and when that is verified."""
    first, second = on_both(_skip, "data", at)
    assert first == second


def _skip(name: str, at: int) -> str:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError

    with training(name) as job:
        for number in range(NUM_STEPS + 2):
            if number == at and is_last_rank():
                with pytest.raises(ZeroDivisionError):
                    job.step(forward_step=fail)
            else:
                job.step()
            torch.distributed.barrier()  # as gradients are summed: a rank cannot be a step ahead
        assert job.view.state is State.HOLD
        return job.decision


@pytest.mark.parametrize("name", ["data", "pipeline"])
def test_a_plan_that_only_one_rank_has_is_not_used(name: str, tmp_path: Path) -> None:
    assert on_both(_states_with_plan, name, str(tmp_path / "plan.json")) == [[State.FLOOR, State.HOLD]] * 2


def _states_with_plan(name: str, file: str) -> list[State]:
    own, found = Path(file.replace(".json", "_rank1.json")), []
    away = own.with_suffix(".away")
    for num_steps in (6, 1, 1):
        with training(name, plan=file) as job:
            job.steps(num_steps)
            found.append(job.view.state)
        if is_last_rank() and len(found) < 3:
            (own if len(found) == 1 else away).rename(away if len(found) == 1 else own)
        torch.distributed.barrier()
    return found[1:]


# -- errors of one rank ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["data", "pipeline"])
def test_a_budget_below_the_floor_of_one_rank_ends_all(name: str) -> None:
    errors = errors_of(_error_of_floor, name)
    assert all("gpu_budget is" in error for error in errors)
    told = [error for error in errors if "less than the" in error and "Raise the budget" in error]
    if name == "pipeline":
        assert len(told) == 1 and "another rank, which says by how much" in errors[1]
    else:
        assert len(told) == 2


def _error_of_floor(name: str) -> str:
    with training(name, 64 << 20) as job:
        with pytest.raises(BudgetError) as caught:
            job.steps(NUM_STEPS, extra=64 << 20)
        assert job.num_steps == 4  # measured twice: what the allocator had before must not count
        return str(caught.value)


@pytest.mark.parametrize("name", ["tensor", "pipeline"])
def test_a_rank_that_cannot_begin_ends_all(name: str) -> None:
    errors = errors_of(_error_at_the_begin, name)
    assert errors[-1].endswith("the GPU is taken")
    assert name == "pipeline" or "another rank of this pipeline stage cannot begin; see its error" in errors[0]


def _error_at_the_begin(name: str) -> str:
    def refuse(size: Any) -> int:
        if is_last_rank():
            raise ValueError("the GPU is taken")
        return 1 << 30

    with mock.patch("megatron_patches._runtime.budget_bytes", refuse), training(name) as job:
        with pytest.raises(ValueError) as caught:
            job.step()
        return str(caught.value)


PLANS = {
    "no group": ('[0, 1, "mlp_fc2"', None, "it has no group 0 1 mlp_fc2 0 (stage, layer,", "another rank rejects"),
    "another layout": (
        '[0, 1, "mlp_fc2"',
        '[0, 7, "mlp_fc2"',
        "it has a group 0 7 mlp_fc2 0 (stage, layer, name, part), and this rank has 1 stage(s)",
        "pipeline rank 1: --offload-plan",  # before the first step
    ),
}


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_of_another_model_on_one_rank_ends_all(case: str, tmp_path: Path) -> None:
    _, _, reason, told_others = PLANS[case]
    errors = errors_of(_error_of_plan, "pipeline", str(tmp_path / "plan.json"), case)
    assert f"--offload-plan {tmp_path}/plan_rank1.json is of another model or layout: {reason}" in errors[1]
    assert told_others in errors[0]


def _error_of_plan(name: str, file: str, case: str) -> str:
    with training(name, plan=file) as job:
        job.steps(6)
    if is_last_rank():
        path = Path(file.replace(".json", "_rank1.json"))
        old, new = PLANS[case][:2]
        lines = path.read_text().splitlines()
        path.write_text("\n".join(line.replace(old, new or "") for line in lines if new or old not in line))
    with training(name, plan=file) as job, pytest.raises(ValueError) as caught:
        job.steps(3)
    return str(caught.value)


def test_a_budget_on_some_stages_only_is_refused() -> None:
    first, second = errors_of(_error_of_one_stage, "pipeline")
    assert first == second and "is set on some ranks of the pipeline, but not on 1: set it on all" in first


def _error_of_one_stage(name: str) -> str:
    given = {} if is_last_rank() else {"offload_gpu_budget": "1GiB"}
    with apply(ALL, has_report=False), pytest.raises(ValueError) as caught:
        run(make_chunks(make_config(**given)), 4)
    return str(caught.value)
