# SPDX-License-Identifier: Apache-2.0
"""Rehearses all ranks of a training job, and makes its forecast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from megatron_patches._arguments import Settings
from megatron_patches._model.sites import Survey, merge_surveys, overlaps_expert_comm, survey
from megatron_patches._model.validate import check_names
from megatron_patches._rehearsal.job import TrainingJob
from megatron_patches._rehearsal.stage import StageRehearsal, StepOutcome
from offload_engine import OffloadConfig
from offload_engine.planning.clocks import Link
from offload_engine.planning.hardware import Hardware
from offload_engine.planning.memory import Job
from offload_engine.planning.predict import Costs
from offload_engine.planning.shapes import Bounds
from offload_engine.rehearsal.chosen import RankChooser
from offload_engine.rehearsal.curve import with_curve
from offload_engine.rehearsal.forecast import (
    CONTEXT_BYTES,
    TE_CONTEXT_BYTES,
    Forecast,
    RankForecast,
    WayForecast,
    make_forecast,
)
from offload_engine.rehearsal.share import kept_by_share

_FULL: Final = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_NO_FULL: Final = {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None}
NUM_WAYS: Final = 3
"""Rehearsals of each rank."""


def forecast_job(
    job: TrainingJob,
    hardware: Hardware,
    budget_bytes: int | None = None,
    on_progress: Callable[[], None] = lambda: None,
    has_curve: bool = False,
) -> Forecast:
    """Rehearse a job on a machine.

    Args:
        job: job of the script.
        hardware: machine of one node.
        budget_bytes: bytes that a process may hold on its GPU; None: all of them.
        on_progress: called `NUM_WAYS` times for each pipeline rank.
        has_curve: predict what every budget would take, too.

    Raises:
        ValueError, AssertionError: if megatron-core rejects the job.
        RehearsalError: if a rank cannot be rehearsed.
    """
    num_stages = job.parallel.get("pipeline_model_parallel_size", 1)
    link = hardware.link(min(hardware.num_gpus, job.world_size), num_stages > 1)
    budget = hardware.gpu_bytes if budget_bytes is None else budget_bytes
    rehearsed = [_rehearse_rank(job, hardware, link, rank, on_progress) for rank in range(num_stages)]
    _check_names(job, rehearsed)
    ranks = [each.forecast for each in rehearsed]
    is_short = any(rank.ways[0].gpu_bytes > budget for rank in ranks)
    choosers = [_chooser(each, link) for each in rehearsed] if is_short or has_curve else []
    if is_short:
        ranks = [rank._replace(chosen=each.within(budget)) for rank, each in zip(ranks, choosers, strict=True)]
    optimizer_ms = max(_optimizer_ms(job, hardware, rank) for rank in ranks)
    found = make_forecast(hardware, link, job.world_size, _num_tokens(job), optimizer_ms, ranks, budget)
    return with_curve(found, choosers) if has_curve else found


class _Rehearsed(NamedTuple):
    """A rank, with what was seen of it with everything offloaded."""

    forecast: RankForecast
    modules: tuple[str, ...]
    """Names to offload, of those that it has."""
    survey: Survey
    """Survey of all its modules."""
    floor: StepOutcome
    """Step with everything offloaded, which may have fewer microbatches."""


def _rehearse_rank(
    job: TrainingJob, hardware: Hardware, link: Link, rank: int, on_progress: Callable[[], None]
) -> _Rehearsed:
    with StageRehearsal(job, hardware, link, rank, **_offloadable(job)).ready() as stage:
        number = stage.steady_microbatches
        settings = stage.settings_of(job.settings)
        if not settings.modules:
            wanted = ", ".join(job.settings.modules) or "the modules"
            raise ValueError(f"stage {rank} has none of {wanted} to offload; it has {', '.join(stage.names())}")
        switches = stage.recomputations(settings)
        none = stage.run(settings._replace(engine=settings.engine.replace(dry_run=True)), number)
        options = () if switches is None else switches.find(none.shapes)
        on_progress()
        away = stage.run(settings, number)
        on_progress()
        held = survey(stage.bare)
        sizes, actions = stage.sizes, tuple(stage.actions(job.num_microbatches))
        is_combined = overlaps_expert_comm(stage.config)
    full = _recomputed(job, hardware, link, rank, number)
    on_progress()
    kept_way = _way("no offload", none, job.has_te)
    if job.parallel.get("pipeline_model_parallel_size", 1) > 1:
        kept_way = kept_way._replace(wasted_in_arena=none.wasted.in_large_arena)  # where nothing moves there is room
    ways = (
        kept_way,
        _way(_name_of_offload(job), away, job.has_te)._replace(host_bytes=away.host_bytes),
        full,
    )
    state = sizes.weight_bytes + sizes.gradient_bytes + sizes.optimizer_bytes
    kept = kept_by_share(none.shapes, actions, settings.engine)
    rank_forecast = RankForecast(
        sizes.num_parameters,
        state,
        actions,
        none.shapes,
        ways,
        job.bounds,
        is_combined,
        options=options,
        refusals=() if switches is None else tuple(switches.refusals),
        kept=kept,
    )
    return _Rehearsed(rank_forecast, settings.modules, held, away)


def _check_names(job: TrainingJob, rehearsed: Sequence[_Rehearsed]) -> None:
    """Refuse names that no rank has, as a run does."""
    if not job.settings.is_taken_over:
        model = merge_surveys(rank.survey for rank in rehearsed)
        check_names(job.settings.modules, model, job.make_config(**_offloadable(job)))
    found = tuple(dict.fromkeys(name for rank in rehearsed for name in rank.modules))
    job.settings.thresholds.check(found)


def _chooser(rehearsed: _Rehearsed, link: Link) -> RankChooser:
    rank = rehearsed.forecast
    floor, [kept, *_] = rehearsed.floor, rank.ways
    short = Job(floor.actions, rank.shapes, rank.bounds, rank.is_combined)
    whole = replace(short, actions=rank.actions)
    overhead = floor.wasted.in_arena, kept.wasted_in_arena, kept.context_bytes
    costs = Costs(link, options=rank.options)
    return RankChooser(short, whole, floor.boundaries, costs, *overhead)


def _name_of_offload(job: TrainingJob) -> str:
    names = ", ".join(job.settings.modules) or "everything"
    within = "" if job.bounds == Bounds() else " within bounds"
    return f"{names} offloaded{' in part' if job.is_partial else ''}{within}"


def _recomputed(job: TrainingJob, hardware: Hardware, link: Link, rank: int, number: int) -> WayForecast:
    changes: dict[str, Any] = {**_FULL, "recompute_modules": None}
    with StageRehearsal(job, hardware, link, rank, **changes).ready() as stage:
        outcome = stage.run(Settings(OffloadConfig(), (), has_report=False), number)
    return _way("full recomputation", outcome, job.has_te)


def _way(name: str, outcome: StepOutcome, has_te: bool) -> WayForecast:
    peak, wasted = outcome.peak_bytes, outcome.wasted
    context_bytes = TE_CONTEXT_BYTES if has_te else CONTEXT_BYTES
    return WayForecast(
        name,
        peak,
        wasted.nbytes,
        outcome.milliseconds,
        context_bytes=context_bytes,
        wasted_in_arena=wasted.in_arena,
    )


def _offloadable(job: TrainingJob) -> dict[str, Any]:
    """Return the changes without which nothing could be offloaded: full recomputation is rehearsed separately."""
    return dict(_NO_FULL) if job.recomputes_all else {}


def _num_tokens(job: TrainingJob) -> int:
    per_replica = job.parallel.get("tensor_model_parallel_size", 1) * job.parallel.get("context_parallel_size", 1)
    per_replica *= job.parallel.get("pipeline_model_parallel_size", 1)
    return job.seq_length * job.micro_batch_size * job.num_microbatches * (job.world_size // per_replica)


def _optimizer_ms(job: TrainingJob, hardware: Hardware, rank: RankForecast) -> float:
    """Return how long it takes to read and write state, gradients and weights once, at the rate of other kernels."""
    return 2 * rank.state_bytes / hardware.memory_gbps / 1e6 if job.optimizer_bytes else 0.0
