# SPDX-License-Identifier: Apache-2.0
"""Losses and gradients are equal, to the last bit, with and without offload, under PyTorch's own pipeline schedules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from offload_engine.frontends.integrations.pipelining import offload_schedule, read_actions, stages_of
from offload_engine.schedule import Action, ChunkKey, parse_actions, validate_actions
from tests.checkpointed import all_equal
from tests.dist.launch import on_ranks
from tests.dist.tiny import ALL, gathered
from tests.lookups import present

RANKS, WIDTH, SAMPLES = 2, 32, 8  # SAMPLES in each microbatch
BLOCK_BYTES = SAMPLES * WIDTH * 4 * 6  # about what one block saves

SINGLE = ["ScheduleGPipe", "Schedule1F1B"]
LOOPED = ["ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble"]
V_SHAPED = ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"]


RUN_HERE = [name for name in (*SINGLE, *LOOPED, *V_SHAPED) if hasattr(schedules, name)]
if not hasattr(PipelineStage, "_is_same_rank"):
    # Before torch 2.13 such a pipeline begins with a rank's messages to itself, which gloo refuses; see tests/gpu.
    RUN_HERE = [name for name in RUN_HERE if name not in V_SHAPED]


@pytest.mark.parametrize("name", RUN_HERE)
@on_ranks(world_size=RANKS)
def test_each_schedule(name: str) -> None:
    """Its order is the one that runs, the numbers are the same, less is resident, and the backward does not wait.

    With two numbers of microbatches; evaluation comes between and after the steps.
    """
    schedule, ran = _make(name, 4), list[Action]()
    for stage in stages_of(schedule):
        _record(stage, ran)
    expected_order = read_actions(schedule)
    validate_actions(expected_order)
    _call(schedule, schedule.step, 0)
    assert ran == expected_order

    for num_microbatches in (4, 6):
        expected = _train(_make(name, num_microbatches))
        with _offloaded(name, num_microbatches) as (schedule, offload):
            offload.record()
            got = _train(schedule)
        assert "Links and waits" in offload.report()
        assert offload.stats.copied_out_bytes > 0 and offload.stats.num_storages_left == 0
        assert all_equal(expected, got)

    peaks = []
    for is_dry in (True, False):
        with _offloaded(name, 6, dry_run=is_dry) as (schedule, offload):
            _call(schedule, schedule.step, 0)
        peaks.append(offload.stats.peak_resident_bytes)
    assert peaks[1] <= 0.8 * peaks[0], peaks  # least where few chunks wait, or what they saved for the weights' part
    # Only where a chunk turns around at once there is no time: one group of two storages each.
    assert offload.stats.prefetch_misses <= 2 * offload.stats.num_kept_groups


@contextmanager
def _offloaded(name: str, num_microbatches: int, **changes: Any) -> Iterator[tuple[Any, Any]]:
    schedule = _make(name, num_microbatches)
    with offload_schedule(schedule, ALL.replace(**changes), group_bytes=BLOCK_BYTES) as offload:
        yield schedule, offload


@on_ranks(world_size=1)
def test_a_split_backward_of_the_first_stage_begins_with_the_weights() -> None:
    (stage,) = stages_of(_make("ScheduleGPipe", 2))
    schedule = schedules._PipelineScheduleRuntime([stage], 2, loss_fn=nn.functional.mse_loss)
    order = [schedules._Action.from_str(text) for text in "0F0 0F1 0I0 0I1 0W1 0W0".split()]
    schedule._prepare_schedule_with_comms({0: order})
    ran: list[Action] = []
    _record(stage, ran)
    _call(schedule, schedule.step, 0)
    assert ran == read_actions(schedule) == parse_actions("F0.0 F0.1 B0.1 B0.0")


@on_ranks(world_size=1)
def test_a_step_that_raises_leaves_nothing_behind() -> None:
    expected = _train(_make("ScheduleGPipe", 4))
    with _offloaded("ScheduleGPipe", 4) as (schedule, offload):
        module = stages_of(schedule)[0].submod
        _call(schedule, schedule.step, 0)
        fail = mock.Mock(side_effect=[None, None, ArithmeticError("told to fail")])
        graphs: list[torch.Tensor] = []  # of the microbatches in front of it: torch's stages keep them, too
        hooks = [
            module[1].register_forward_pre_hook(fail),
            module.register_forward_hook(lambda module, args, output: graphs.append(output)),
        ]
        with pytest.raises(RuntimeError, match="failed to run forward"):
            _call(schedule, schedule.step, 0)
        for hook in hooks:
            hook.remove()
        schedule._internal_losses.clear()  # which torch's schedule keeps (2.13)
        assert len(graphs) == 2 and not offload._session.engine.has_saved
        module.zero_grad()
        got = _train(schedule)
    assert all_equal(expected, got)


@on_ranks(world_size=RANKS)
def test_remove_gives_everything_back() -> None:
    schedule = _make("Schedule1F1B", 4)
    (stage,) = stages_of(schedule)
    before = [vars(schedule).keys() - {"step"}, vars(stage).keys() - {"forward_one_chunk"}]
    offload = offload_schedule(schedule, ALL, group_bytes=BLOCK_BYTES)
    with pytest.raises(ValueError, match="already offloaded"):
        offload_schedule(schedule, ALL)
    _call(schedule, schedule.step, 0)
    assert all(map(torch.equal, copy.deepcopy(stage.submod).parameters(), stage.submod.parameters()))
    # Inputs of stages stay, those of the first as well, which need no gradient: equal stages have the same to move.
    first, second = gathered(offload.stats.managed_bytes)
    assert first == second > 0
    copied = offload.stats.copied_out_bytes
    offload.remove()
    offload.remove()
    _call(schedule, schedule.step, 0)
    assert offload.stats.copied_out_bytes == copied > 0
    assert [vars(schedule).keys(), vars(stage).keys()] == before
    assert not stage.submod._forward_pre_hooks
    for wrong, message in (
        (stage, "expected a schedule"),
        (schedules._ScheduleForwardOnly(stage, 4), "in which order"),
    ):
        with pytest.raises(TypeError, match=message):
            offload_schedule(wrong, ALL)


class Block(nn.Sequential):
    """What a transformer layer does to memory: a norm, a wide middle, an activation function, a residual."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


def _make(name: str, num_microbatches: int) -> Any:
    """Return the schedule on this rank, with its stages; the same weights at each call."""
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    second = rank + num_ranks if name in LOOPED else 2 * num_ranks - 1 - rank
    indices = [rank] if name in SINGLE else [rank, second]
    stages = []
    for index in indices:
        torch.manual_seed(index)
        module = nn.Sequential(*(Block() for _ in range(3)))
        stages.append(PipelineStage(module, index, num_ranks * len(indices), torch.device("cpu")))
    own: Any = stages[0] if name in SINGLE else stages
    return getattr(schedules, name)(own, num_microbatches, loss_fn=nn.functional.mse_loss)


def _call(schedule: Any, run: Callable[..., Any], step: int) -> list[torch.Tensor]:
    """Run one step, or evaluation; return the losses, on the ranks that have them."""
    generator = torch.Generator().manual_seed(step)
    samples, target = torch.randn(2, schedule._n_microbatches * SAMPLES, WIDTH, generator=generator)
    stages = stages_of(schedule)
    losses: list[torch.Tensor] = []
    args = (samples,) if any(stage.is_first for stage in stages) else ()
    if any(stage.is_last for stage in stages):
        run(*args, target=target, losses=losses)
    else:
        run(*args)
    return [loss.detach().clone() for loss in losses]


def _train(schedule: Any) -> list[torch.Tensor]:
    """Return losses and gradients, which add up over two steps."""
    losses = []
    for step in range(2):
        losses += _call(schedule, schedule.step, step)
        if type(schedule).__name__ not in V_SHAPED:  # whose `eval` raises with or without offload (torch 2.11 and 2.13)
            losses += _call(schedule, schedule.eval, 100 + step)  # behind it: torch 2.11 cannot begin with it
    return [*losses, *(present(p.grad).clone() for stage in stages_of(schedule) for p in stage.submod.parameters())]


def _record(stage: Any, ran: list[Action]) -> None:
    """Note when a chunk saves, and when it first reads, what it saved."""
    forward = stage.forward_one_chunk

    def run(fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        key = ChunkKey(stage.stage_index, fwd_chunk_id)
        ran.append(Action("F", key))
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor, key), read):
            return forward(fwd_chunk_id, *args, **kwargs)

    def read(saved: tuple[torch.Tensor, ChunkKey]) -> torch.Tensor:
        tensor, key = saved
        if Action("B", key) not in ran:
            ran.append(Action("B", key))
        return tensor

    stage.forward_one_chunk = run
