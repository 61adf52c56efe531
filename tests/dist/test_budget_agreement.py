# SPDX-License-Identifier: Apache-2.0
"""Ranks of a stage decide alike within a budget, whatever befalls one of them; an error of one ends all."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("megatron.core")

import torch  # noqa: E402
from megatron.core import parallel_state as ps  # noqa: E402

from megatron_patches import Handle, apply  # noqa: E402
from offload_engine import OffloadConfig  # noqa: E402
from offload_engine._budget.state import State  # noqa: E402
from offload_engine.errors import BudgetError  # noqa: E402
from tests.dist.launch import Pipeline, run_ranks  # noqa: E402
from tests.dist.tiny import fingerprint, make_chunks, make_config, run  # noqa: E402

NUM_STEPS = 8
BOUNDED_S = 30.0
SHAPES = {
    "tensor": ("dense", Pipeline(tensor=2)),
    "data": ("dense", Pipeline()),
    "experts": ("mixed", Pipeline(expert=2)),
    "context": ("dense", Pipeline(context=2)),
    "pipeline": ("dense", Pipeline(2)),
}


class Skewed:
    """A gauge of a device on which all else takes `extra` bytes more."""

    def __init__(self, gauge: Any, extra: int) -> None:
        self._gauge = gauge
        self.extra = extra

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gauge, name)

    def peak_bytes(self) -> int:
        return self._gauge.peak_bytes() + self.extra

    def held_bytes(self) -> int:
        return self._gauge.held_bytes() + self.extra

    def outside_bytes(self) -> int:
        return self._gauge.outside_bytes() + self.extra


class Job:
    """A tiny model that trains within a budget; on one rank all else takes more."""

    def __init__(self, name: str, handle: Handle, budget: int, **settings: Any) -> None:
        self._handle = handle
        kind = SHAPES[name][0]
        settings["tensor_model_parallel_size"] = ps.get_tensor_model_parallel_world_size()
        self.is_skewed = is_last_rank() is not (name == "pipeline")  # its first stage has more to move
        if kind == "mixed":
            settings["expert_model_parallel_size"] = 2
        self._reference = make_chunks(make_config(kind, **settings))
        self.chunks = make_chunks(make_config(kind, **settings, offload_gpu_budget=str(budget)))
        self._optimizer = torch.optim.SGD([p for chunk in self.chunks for p in chunk.parameters()], lr=0.0)
        self.num_steps = 0

    @property
    def view(self) -> Any:
        assert self._handle.engine is not None and self._handle.engine.budget is not None
        return self._handle.engine.budget

    def step(self, extra: int = 0, **more: Any) -> dict[str, str]:
        found = fingerprint(self.chunks, run(self.chunks, 2, **more))
        self._optimizer.step()
        self.num_steps += 1
        if not isinstance(self.view._last.gauge, Skewed):
            self.view._last.gauge = Skewed(self.view._last.gauge, 0)
        self.view._last.gauge.extra = extra if self.is_skewed else 0
        return found

    @property
    def decision(self) -> str:
        """What was decided: the same on ranks that decide alike."""
        choices, room = self.view.decider.chosen.best.decision
        return f"{sorted(choices.kept)} {sorted(choices.recomputed)} {room}"


def is_last_rank() -> bool:
    return torch.distributed.get_rank() == torch.distributed.get_world_size() - 1


def on_ranks(fn: Callable[..., Any], name: str, *args: Any) -> list[Any]:
    """Run on two ranks; return what each does."""
    return run_ranks(fn, name, *args, world_size=2, pipeline=SHAPES[name][1], timeout_s=90.0)


def patched(**settings: Any) -> Handle:
    gc.disable()
    return apply(OffloadConfig(min_tensor_bytes=1, directory="none"), has_report=False, **settings)


def ends(name: str) -> tuple[int, int]:
    """What groups take on this rank with everything offloaded, and with nothing moved."""
    with patched() as handle:
        job = Job(name, handle, 1 << 40)
        for _ in range(6):
            job.step()
        chosen = job.view.decider.chosen
        return chosen.floor.held_bytes, chosen.top.held_bytes


def most(*numbers: int) -> list[int]:
    tensor = torch.tensor(numbers)
    torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
    return tensor.tolist()


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "data"])  # these agree over the same group
def test_ranks_with_unequal_room_keep_the_same(name: str) -> None:
    found = on_ranks(_check_unequal, name)
    if name == "pipeline":  # each stage has memory of its own
        assert found[0][0] != found[1][0]
    else:
        assert found[0] == found[1]


def _check_unequal(name: str) -> tuple[str, str]:
    floor, top = ends(name)
    [highest] = most(top)
    budget = 2 * highest
    with patched() as handle:
        job, states = Job(name, handle, budget), []
        expected = fingerprint(job._reference, run(job._reference, 2))
        for _ in range(NUM_STEPS):
            assert job.step(extra=budget - top + (top - floor) // 2) == expected
            states.append(job.view.state)
        assert states[-1] is State.HOLD and job.view.measured_bytes <= budget
        assert job.view.decider.chosen.best.num_moves or not job.is_skewed
        return job.decision, str([state.name for state in states])


@pytest.mark.parametrize("name", ["data", "pipeline"])
def test_a_budget_below_the_floor_of_one_rank_ends_all(name: str) -> None:
    before = time.monotonic()
    errors = on_ranks(_error_of_floor, name)
    assert time.monotonic() - before < BOUNDED_S
    told = [error for error in errors if "less than the" in error and "Raise the budget" in error]
    assert len(told) == (1 if name == "pipeline" else 2)
    assert all("gpu_budget is" in error for error in errors)
    if name == "pipeline":
        assert errors[1] == "gpu_budget is below what a step takes on another rank, which says by how much"


def _error_of_floor(name: str) -> str:
    with patched() as handle:
        job = Job(name, handle, 64 << 20)
        with pytest.raises(BudgetError) as caught:
            for _ in range(NUM_STEPS):
                job.step(extra=64 << 20)
        assert job.num_steps == 5  # measured twice: what the allocator had before must not count
        return str(caught.value)


@pytest.mark.parametrize("name", ["tensor", "pipeline"])
def test_a_rank_that_cannot_begin_ends_all(name: str) -> None:
    before = time.monotonic()
    errors = on_ranks(_error_at_the_begin, name)
    assert time.monotonic() - before < BOUNDED_S
    if name == "tensor":
        assert errors[0] == "--offload-gpu-budget: another rank of this pipeline stage cannot begin, and says why"
    assert errors[-1].endswith("the GPU is taken")


def _error_at_the_begin(name: str) -> str:
    def refuse(size: Any) -> int:
        if is_last_rank():
            raise ValueError("the GPU is taken")
        return 1 << 30

    with patched() as handle, mock.patch("megatron_patches._runtime.budget_bytes", refuse):
        with pytest.raises(ValueError) as caught:
            Job(name, handle, 1 << 30).step()
        return str(caught.value)


def test_the_smallest_budget_of_a_stage_is_that_of_all() -> None:
    assert on_ranks(_budget_of_rank, "data") == [1 << 29, 1 << 29]
    assert on_ranks(_budget_of_rank, "pipeline") == [1 << 30, 1 << 29]


def _budget_of_rank(name: str) -> int:
    def budget_bytes(size: Any) -> int:
        return 1 << (29 if is_last_rank() else 30)

    with patched() as handle, mock.patch("megatron_patches._runtime.budget_bytes", budget_bytes):
        job = Job(name, handle, 1 << 30)
        job.step()
        budget: int = job.view.decider.budget_bytes
        return budget


@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_step_that_one_rank_skips_leaves_no_other_waiting(at: int) -> None:
    """Its number says in which state: before all is measured, in the measured step, and when that is verified."""
    decisions = on_ranks(_skip, "data", at)
    assert decisions[0] == decisions[1]


def _skip(name: str, at: int) -> str:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError

    with patched() as handle:
        job = Job(name, handle, 1 << 30)
        for step in range(NUM_STEPS + 2):
            if step == at and is_last_rank():
                with pytest.raises(ZeroDivisionError):
                    job.step(forward_step=fail)
            else:
                job.step()
            torch.distributed.barrier()  # as gradients are summed: a rank cannot be a step ahead
        assert job.view.state is State.HOLD
        return job.decision


def test_a_plan_that_only_one_rank_has_is_not_used(tmp_path: Path) -> None:
    for name in ("data", "pipeline"):
        assert on_ranks(_states_with_plan, name, str(tmp_path / f"{name}.json")) == [[State.FLOOR, State.HOLD]] * 2


def _states_with_plan(name: str, file: str) -> list[State]:
    own, found = Path(file.replace(".json", "_rank1.json")), []
    for num_steps in (6, 1, 1):
        with patched(plan=file) as handle:
            job = Job(name, handle, 1 << 30)
            for _ in range(num_steps):
                job.step()
            found.append(job.view.state)
        if is_last_rank() and len(found) < 3:
            away = own.with_suffix(".away")
            (own if len(found) == 1 else away).rename(away if len(found) == 1 else own)
        torch.distributed.barrier()
    return found[1:]


def test_a_plan_of_another_model_on_one_rank_ends_all(tmp_path: Path) -> None:
    before = time.monotonic()
    errors = on_ranks(_error_of_plan, "pipeline", str(tmp_path / "plan.json"))
    assert time.monotonic() - before < BOUNDED_S
    own, other = f"--offload-plan {tmp_path}/plan_rank0.json", f"--offload-plan {tmp_path}/plan_rank1.json"
    assert errors[1].startswith(f"{other} is of another model or layout: it has no group 0 1 mlp_fc2 0 (stage, layer,")
    assert errors[0] == f"{own} is not used: another rank refuses its plan, and says why"


def test_a_plan_of_another_layout_is_refused_before_the_first_step(tmp_path: Path) -> None:
    errors = on_ranks(_error_of_layout, "pipeline", str(tmp_path / "plan.json"))
    assert errors[0] == f"pipeline rank 1: {errors[1]}"
    assert errors[1].startswith(
        f"--offload-plan {tmp_path}/plan_rank1.json is of another model or layout: it has a group 0 7 mlp_fc2 0 "
        "(stage, layer, name, part), and this rank has 1 stage(s) with layer_input, qkv_linear"
    )


def _error_of_layout(name: str, file: str) -> str:
    with patched(plan=file) as handle:
        job = Job(name, handle, 1 << 30)
        for _ in range(6):
            job.step()
    if is_last_rank():
        path = Path(file.replace(".json", "_rank1.json"))
        path.write_text(path.read_text().replace('[0, 1, "mlp_fc2"', '[0, 7, "mlp_fc2"'))
    with patched(plan=file) as handle, pytest.raises(ValueError) as caught:
        Job(name, handle, 1 << 30).step()
    return str(caught.value)


def _error_of_plan(name: str, file: str) -> str:
    with patched(plan=file) as handle:
        job = Job(name, handle, 1 << 30)
        for _ in range(6):
            job.step()
    if is_last_rank():
        path = Path(file.replace(".json", "_rank1.json"))
        lines = path.read_text().splitlines()
        path.write_text("\n".join(line for line in lines if '[0, 1, "mlp_fc2"' not in line))
    with patched(plan=file) as handle, pytest.raises(ValueError) as caught:
        job = Job(name, handle, 1 << 30)
        for _ in range(3):
            job.step()
    return str(caught.value)


def test_a_rank_above_its_budget_keeps_less_at_once_and_all_do_when_a_window_is_over() -> None:
    decisions = on_ranks(_grow, "tensor")
    assert decisions[0][1] != decisions[1][1]
    assert decisions[0][0] == decisions[1][0] != decisions[0][2] == decisions[1][2]


def _grow(name: str) -> list[str]:
    floor, top = ends(name)
    budget, found = 2 * top, []
    with patched() as handle, mock.patch("offload_engine._budget.controller._WINDOW_STEPS", 10):
        job = Job(name, handle, budget)
        for step in range(1, 13):
            job.step(extra=0 if step < 7 else budget - top + (top - floor) // 2)
            if step in (6, 10, 12):
                found.append(job.decision)
        assert job.view.state is State.HOLD
    return found


def test_a_budget_on_some_stages_only_is_refused() -> None:
    errors = on_ranks(_error_of_one_stage, "pipeline")
    assert errors[0] == errors[1]
    assert "offload_gpu_budget is set on some ranks of the pipeline, but not on 1: set it on all" in errors[0]


def _error_of_one_stage(name: str) -> str:
    given = {"offload_gpu_budget": "1GiB"} if ps.get_pipeline_model_parallel_rank() == 0 else {}
    with patched(), pytest.raises(ValueError) as caught:
        run(make_chunks(make_config("dense", **given)), 4)
    return str(caught.value)
