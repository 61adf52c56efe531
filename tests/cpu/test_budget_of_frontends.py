# SPDX-License-Identifier: Apache-2.0
"""Budgets in every front-end: steps that need no groups, evaluations in between, and what front-ends leave behind."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.optim import optimizer as torch_optimizer

from offload_engine import (
    CheckpointOffload,
    OffloadConfig,
    OffloadEngine,
    enable_activation_offloading,
)
from offload_engine._budget.state import State
from offload_engine.frontends.integrations.pipelining import offload_schedule
from offload_engine.plan_files import load_plan, save_plan

HIDDEN, ROWS, DEPTH = 64, 256, 4
Step = Callable[[nn.Module, torch.Tensor], None]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU()) for _ in range(DEPTH)))


def plenty() -> OffloadConfig:
    return OffloadConfig(min_tensor_bytes=1, directory="none", gpu_budget=1 << 30, recompute="off")


def layers(model: nn.Module) -> tuple[OffloadEngine, Step]:
    handle = enable_activation_offloading(model, config=plenty(), layers=list(model.children()))
    return handle.engine, lambda model, x: model(x).square().mean().backward()


def checkpoints(model: nn.Module) -> tuple[OffloadEngine, Step]:
    offload = CheckpointOffload(plenty())

    def step(model: nn.Module, x: torch.Tensor) -> None:
        for layer in model.children():
            x = offload.checkpoint(layer, x)
        offload.end_forward()
        x.square().mean().backward()

    return offload.engine, step


def train(model: nn.Module, step: Step, num_steps: int) -> list[torch.Tensor]:
    """Train; return the gradients of the last step."""
    optimizer, batches = torch.optim.SGD(model.parameters(), lr=0.1), torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        step(model, torch.randn(ROWS, HIDDEN, generator=batches))
        optimizer.step()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_steps_that_need_no_groups_have_the_same_gradients() -> None:
    """Those of layers and of groups by size: test_budget.py."""
    model = make_model()
    engine, step = checkpoints(model)
    assert engine.budget is not None
    engine.budget._idleness.is_measured = True  # as on a GPU
    found = train(model, step, 9)
    assert engine.budget.state is State.HOLD and engine.budget.is_idle
    engine.close()
    plain = make_model()
    expected = train(plain, lambda model, x: model(x).square().mean().backward(), 9)
    assert all(map(torch.equal, found, expected))


@pytest.fixture
def process_group() -> Iterator[None]:
    """Be the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_schedule_knows_its_chunks_in_steps_that_need_no_groups(process_group: None) -> None:
    """A step without groups had begun a chunk of its own, by which activations had grown: all was measured again."""
    model = make_model()
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=lambda y, t: (y - t).square().mean())
    handle = offload_schedule(schedule, plenty(), group_bytes=1 << 16)
    engine, keys = handle.engine, []
    assert engine.budget is not None
    engine.budget._idleness.is_measured = True  # as on a GPU
    start_chunk = engine.start_chunk
    engine.start_chunk = lambda *args, **settings: (keys.append(args), start_chunk(*args, **settings))[1]  # type: ignore[func-returns-value, method-assign]
    optimizer, num_idle = torch.optim.SGD(model.parameters(), lr=0.1), 0
    for _ in range(12):
        keys.clear()
        schedule.step(torch.ones(ROWS, HIDDEN), target=torch.zeros(ROWS, HIDDEN))
        optimizer.step()
        assert len(keys) == (0 if engine.is_idle else 4)
        num_idle += engine.is_idle
    assert engine.budget.state is State.HOLD and num_idle >= 4
    handle.remove()


def test_evaluations_with_gradients_are_no_steps() -> None:
    """Eight of them in a row, without `no_grad`, had ended the planning for good."""
    model = make_model()
    engine, step = layers(model)
    assert engine.budget is not None
    train(model, step, 3)
    for _ in range(12):
        model(torch.ones(ROWS, HIDDEN))
    train(model, step, 9)
    assert engine.budget.state is State.HOLD and engine.budget.decider.chosen is not None
    assert engine.stats.copied_out_bytes == 0  # everything fits
    engine.close()


def test_a_plan_may_be_loaded_twice_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    model, file = make_model(), tmp_path / "plan.json"
    engine, step = layers(model)
    train(model, step, 9)
    save_plan(engine, file)
    engine.close()
    engine, step = layers(make_model())
    load_plan(engine, file)
    load_plan(engine, file)
    assert engine.budget is not None and engine.budget.state is State.HOLD
    engine.close()
    good = json.loads(file.read_text())
    for name, value in (("held_bytes", None), ("held_bytes", 1.5), ("slots", [["0", *good["slots"][0][1:]]])):
        file.write_text(json.dumps({**good, name: value}))
        engine, _ = layers(make_model())
        with pytest.raises(ValueError, match="plan.json is not a plan of this version"):
            load_plan(engine, file)
        engine.close()


def test_an_engine_that_is_dropped_leaves_no_hook_on_optimizers() -> None:
    before = len(torch_optimizer._global_optimizer_post_hooks)
    for _ in range(3):
        OffloadEngine(plenty())
    gc.collect()
    assert len(torch_optimizer._global_optimizer_post_hooks) == before
