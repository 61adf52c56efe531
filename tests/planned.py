"""The jobs of `tests/virtual_time.py` as plans and shapes, to run them without an engine."""

from __future__ import annotations

from typing import Any

from offload_engine.planning.plan import Plan, make_plan
from offload_engine.planning.planner import plan_step
from offload_engine.planning.shapes import Bounds, ChunkShape, GroupShape
from offload_engine.planning.simulate import PipelineJob, RankJob, Simulation, simulate
from tests import virtual_time
from tests.virtual_time import HEAD_MS, LAYER, MIB, Job


def chunk_shape(names: tuple[str, ...], num_layers: int, has_head: bool = False) -> ChunkShape:
    """A chunk of dense layers, of which the modules `names` are groups."""
    groups: list[GroupShape] = []
    lead, tail_index = 0.0, None
    for layer in range(num_layers):
        for module in LAYER:
            if module.is_tail and layer == num_layers - 1 and num_layers > 1:
                tail_index = len(groups)
            if module.name not in names:
                lead += module.milliseconds
                continue
            nbytes = sum(module.saved_mib) * MIB
            times = module.milliseconds, 2 * module.milliseconds, lead, 2 * lead
            groups.append(GroupShape(module.name, layer, nbytes, *times))
            lead = 0.0
    head = (HEAD_MS, 2 * HEAD_MS) if has_head else (0.0, 0.0)
    return ChunkShape(tuple(groups), num_layers, tail_index, (), has_head, *head, lead, 2 * lead)


def pipeline_job(job: Job, **bounds: int) -> PipelineJob:
    """The ranks of `job`; `bounds` in MiB."""
    limits = Bounds(**{name: mib * MIB for name, mib in bounds.items()})
    num_stages = job.pipeline * job.virtual
    ranks = []
    for rank in range(job.pipeline):
        stages = [virtual * job.pipeline + rank for virtual in range(job.virtual)]
        shapes = [chunk_shape(job.names, job.layers // num_stages, stage == num_stages - 1) for stage in stages]
        ranks.append(RankJob(tuple(virtual_time._actions(job, rank)), tuple(shapes), limits))
    return PipelineJob(tuple(ranks))


def plans_of(job: PipelineJob, **options: Any) -> list[Plan]:
    """A plan for each rank."""
    return [plan_step(rank.actions, rank.shapes, rank.bounds, **options) for rank in job.ranks]


def run_planned(job: Job, skip: tuple[str, ...] = (), **bounds: int) -> Simulation:
    """One step of `job` as planned; `bounds` in MiB."""
    planned = pipeline_job(job, **bounds)
    return simulate(planned, plans_of(planned, skip=skip))


def run_without_offload(job: Job) -> Simulation:
    """One step of `job` in which nothing moves."""
    planned = pipeline_job(job)
    return simulate(planned, [make_plan([])] * job.pipeline)
