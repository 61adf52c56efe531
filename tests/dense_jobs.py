# SPDX-License-Identifier: Apache-2.0
"""Pipelines of dense layers with the bytes and times of an H200, to be planned and simulated. Sizes are in MiB."""

from __future__ import annotations

import dataclasses
from typing import Any

from offload_engine.planning.plan import Plan, make_plan
from offload_engine.planning.planner import plan_step
from offload_engine.planning.shapes import Bounds, ChunkShape, GroupShape
from offload_engine.planning.simulate import PipelineJob, RankJob, Simulation, simulate
from offload_engine.schedule import Action, interleaved, no_pipelining, one_forward_one_backward

MIB = 1 << 20


def _module(name: str, mib: int, milliseconds: float) -> GroupShape:
    return GroupShape(name, nbytes=mib * MIB, forward_ms=milliseconds, backward_ms=2 * milliseconds)


# Hidden size 4096, a sequence of 8192.
LAYER = (
    _module("qkv_linear", 64, 1.3),
    _module("core_attn", 321, 2.15),
    _module("attn_proj", 0, 0.6),
    _module("mlp_fc1", 128, 2.9),
    _module("mlp_act", 448, 0.35),
    _module("mlp_fc2", 224, 1.65),
)
TAIL = "mlp_fc1"
HEAD_MS = 2.75

ALL = tuple(module.name for module in LAYER)
ATTENTION = ("qkv_linear", "core_attn")
MOST = (*ATTENTION, "attn_proj", "mlp_fc1", "mlp_fc2")


def chunk_shape(names: tuple[str, ...], num_layers: int, has_head: bool = False) -> ChunkShape:
    """Make a chunk of dense layers, of which the modules `names` are groups."""
    groups: list[GroupShape] = []
    lead, tail_index = 0.0, None
    for layer in range(num_layers):
        for module in LAYER:
            if module.name == TAIL and layer == num_layers - 1 and num_layers > 1:
                tail_index = len(groups)
            if module.name in names:
                groups.append(dataclasses.replace(module, layer=layer, lead_ms=lead, lead_backward_ms=2 * lead))
                lead = 0.0
            else:
                lead += module.forward_ms
    head = (HEAD_MS, 2 * HEAD_MS) if has_head else (0.0, 0.0)
    shape = ChunkShape(tuple(groups), num_layers, tail_index, (), has_head, *head, lead, 2 * lead)
    return dataclasses.replace(shape, has_tail_end=tail_index is not None)


def dense_job(
    names: tuple[str, ...] = ALL,
    *,
    pipeline: int = 2,
    virtual: int = 2,
    num_microbatches: int = 8,
    layers: int = 8,
    **bounds: int,
) -> PipelineJob:
    """Make a pipeline that offloads the modules `names`, within `bounds` in MiB."""
    last_stage = pipeline * virtual - 1
    ranks = []
    for rank in range(pipeline):
        stages = range(rank, last_stage + 1, pipeline)
        shapes = tuple(chunk_shape(names, layers // (last_stage + 1), stage == last_stage) for stage in stages)
        ranks.append(RankJob(tuple(_actions(pipeline, rank, virtual, num_microbatches)), shapes))
    return with_bounds(PipelineJob(tuple(ranks)), **bounds)


def _actions(pipeline: int, rank: int, virtual: int, num_microbatches: int) -> list[Action]:
    if virtual > 1:
        return interleaved(pipeline, rank, virtual, num_microbatches)
    if pipeline > 1:
        return one_forward_one_backward(pipeline, rank, num_microbatches)
    return no_pipelining(num_microbatches)


def with_bounds(job: PipelineJob, **bounds: int) -> PipelineJob:
    """Give every rank of `job` these bounds, in MiB."""
    limits = Bounds(**{name: mib * MIB for name, mib in bounds.items()})
    return dataclasses.replace(job, ranks=tuple(dataclasses.replace(rank, bounds=limits) for rank in job.ranks))


DEEP = dense_job(MOST, pipeline=4, virtual=1, num_microbatches=16, layers=16)
ONE_RANK = dense_job(ALL, pipeline=1, virtual=1, num_microbatches=4)


def plans_of(job: PipelineJob, **options: Any) -> list[Plan]:
    """Plan the step of each rank."""
    return [plan_step(rank.actions, rank.shapes, rank.bounds, **options) for rank in job.ranks]


def simulate_planned(job: PipelineJob, skip: tuple[str, ...] = ()) -> Simulation:
    """Simulate a planned step, without the passes `skip` of the planner."""
    return simulate(job, plans_of(job, skip=skip))


def over_no_offload(job: PipelineJob) -> float:
    """Return the time of a simulated step over that of a step in which nothing moves."""
    return simulate_planned(job).milliseconds / simulate(job, [make_plan([])] * len(job.ranks)).milliseconds
