# SPDX-License-Identifier: Apache-2.0
"""Learns from a measured step what decisions need: times of groups, and a model of memory."""

from __future__ import annotations

import dataclasses
from typing import Final, NamedTuple

from offload_engine._budget.agreement import Agree, agreed_job, agreed_model, agreed_times
from offload_engine._budget.garbage import no_collections
from offload_engine._budget.gauge import ResidentGauge
from offload_engine._budget.measure import MeasuringRecorder
from offload_engine._budget.times import action_times, timed_parts, with_times
from offload_engine._devices.base import MemoryGauge
from offload_engine.planning.allocations import RecordedStep
from offload_engine.planning.memory import Job, MeasuredMemory, MemoryModel, make_groups_model, make_memory_model
from offload_engine.planning.shapes import step_boundaries
from offload_engine.planning.shortened import shortened_record

_US: Final = 1e3
"""Of a millisecond."""


class Learned(NamedTuple):
    """What a measured step has shown."""

    job: Job
    """With times."""
    model: MemoryModel
    wasted_bytes: int
    """Reserved in vain."""
    recorded: RecordedStep | None
    """None if a rank could not record its allocations."""
    waited_ms: float
    """How long compute waited for copies."""
    took_ms: tuple[float, ...]
    """How long each of its actions took."""
    own_job: Job
    """With the groups of this rank, where those of `job` are agreed."""
    own_model: MemoryModel
    """Of this rank."""
    are_own: bool
    """Whether this rank has all bytes of `job`, in each microbatch."""
    copied_share: float
    """Share of the bytes of `job` that a rank copies at most."""


@no_collections()
def learned(job: Job, recorder: MeasuringRecorder, gauge: MemoryGauge, agree: Agree, is_early_certain: bool) -> Learned:
    """Return what a measured step has shown.

    Args:
        job: of the step, in which everything was offloaded; without times.
        recorder: of the step; blocks until the device has come to its end.
        gauge: not reset since the step ended.
        agree: with the other ranks that decide alike.
        is_early_certain: see `make_memory_model`.
    """
    # Where groups alone are measured, none are left between steps; the gauge has the peak of the whole step.
    between = gauge.peak_bytes() if is_early_certain else 0
    peak = max([between, *(each.peak_bytes for each in recorder.boundaries)])
    overhead, wasted = max(0, gauge.held_bytes() - peak), max(0, gauge.held_bytes() - gauge.outside_bytes() - peak)
    waits = recorder.waits()
    recorder.close()
    timed = timed_parts(job.shapes, recorder.intervals(), waits)
    own_job = dataclasses.replace(job, shapes=with_times(job.shapes, timed))
    agreed = agreed_job(agree, own_job.shapes)
    job = dataclasses.replace(job, shapes=agreed.shapes)
    took_ms = agreed_times(agree, action_times(job.actions, timed))
    memory = MeasuredMemory(recorder.boundaries, between, overhead, wasted)
    if isinstance(gauge, ResidentGauge):
        own_model = model = make_groups_model(job, memory)
    else:
        own_model = model = make_memory_model(job, memory, is_early_certain=is_early_certain)
        if not agreed.are_own:
            own_model = make_memory_model(own_job, memory, is_early_certain=is_early_certain)
    whole = recorder.allocations()
    are_own = agreed.are_own and (whole is None or whole.is_like(own_job.shapes))
    recorded = None if whole is None else shortened_record(whole, own_job)
    num_events = 0 if recorded is None else recorded.most_events
    waited_us = round(_US * sum(wait.exposed_ms for wait in waits))
    has_lags = recorded is not None and recorded.has_lags
    own = wasted, int(recorded is None), num_events, int(has_lags), waited_us
    wasted, lacks_record, most_events, some_have_lags, waited_us = agree(own)
    if recorded is not None:
        recorded.most_events, recorded.has_lags = most_events, bool(some_have_lags)
    model = agreed_model(agree, model, step_boundaries(job.actions, job.shapes))
    return Learned(
        job=job,
        model=model,
        wasted_bytes=wasted,
        recorded=None if lacks_record else recorded,
        waited_ms=waited_us / _US,
        took_ms=took_ms,
        own_job=own_job,
        own_model=own_model,
        are_own=are_own,
        copied_share=agreed.most_share,
    )
