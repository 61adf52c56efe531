# SPDX-License-Identifier: Apache-2.0
"""Simulates the plans of all ranks of a pipeline: how long a step takes, where compute waits, where the bytes are.

Kernels and copies advance clocks; ranks wait for each other where the schedule says so. If forward and backward of two
chunks run together, they are simulated one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from offload_engine.planning.clocks import Clocks, Link, Span
from offload_engine.planning.host_bytes import HostBytes
from offload_engine.planning.moves import (
    BACKWARD,
    BACKWARD_END,
    CHUNK_BACKWARD,
    COMMIT,
    FORWARD_END,
    HEAD,
    ITERATION_END,
    LOSS_DONE,
    Boundary,
    GroupKey,
)
from offload_engine.planning.plan import Plan
from offload_engine.planning.shapes import Bounds, ChunkShape, Shapes, step_boundaries
from offload_engine.planning.simulated import Counters, SimulatedExecutor
from offload_engine.schedule import Action, ChunkKey


@dataclass(frozen=True)
class RankJob:
    """What one pipeline rank runs."""

    actions: tuple[Action, ...]
    shapes: Shapes
    bounds: Bounds = field(default_factory=Bounds)
    boundaries: tuple[tuple[Boundary, ...], ...] | None = None
    """The boundaries of each action, as `step_boundaries` lists them, if they are known."""

    def of_actions(self) -> Iterator[tuple[Action, Sequence[Boundary]]]:
        """Iterate over the actions and their boundaries."""
        known = self.boundaries or (step_boundaries([action], self.shapes)[:-1] for action in self.actions)
        return zip(self.actions, known, strict=True)


@dataclass(frozen=True)
class PipelineJob:
    """What all ranks of a pipeline run. Virtual stage `v` of rank `r` is stage `v * number of ranks + r`."""

    ranks: tuple[RankJob, ...]
    link: Link = field(default_factory=Link)


class ActionTime(NamedTuple):
    """How long a rank is at work in one action, in ms; waits for other ranks do not count."""

    milliseconds: float
    stalled_ms: float
    """Of these, how long compute waits for copies."""


class RankOutcome(NamedTuple):
    """One rank's step."""

    milliseconds: float
    stalls: dict[str, float]
    """How long compute waited for copies, in ms, by kind of boundary and name of group, as "BACKWARD core_attn". END is
    the end of a backward whose group a copy-out still read."""
    counters: Counters
    spans: list[Span]
    """The timeline, in the order of the host."""
    of_actions: tuple[ActionTime, ...] = ()
    """The times of each action, in order."""

    @property
    def stalled_ms(self) -> float:
        """Return how long compute waited for copies."""
        return sum(self.stalls.values())


class Simulation(NamedTuple):
    """One step of a pipeline."""

    milliseconds: float
    """Until the last rank has finished."""
    ranks: list[RankOutcome]


def simulate(job: PipelineJob, plans: Sequence[Plan], *, is_drawn: bool = True, peak_host_bytes: int = 0) -> Simulation:
    """Simulate a step of which each rank has a host pool already.

    Args:
        job: the job, with bytes and times.
        plans: the plan of each rank.
        is_drawn: whether the outcome has a timeline, which takes a fifth of the time.
        peak_host_bytes: lent at the most in the steps before, on each rank; 0: one like this came before, which is
            simulated, too.

    Raises:
        ValueError: if the numbers of plans and ranks differ, or if the ranks wait for each other for ever.
    """
    if len(plans) != len(job.ranks):
        raise ValueError(f"{len(plans)} plans for {len(job.ranks)} ranks")
    hosts = [HostBytes(peak_host_bytes) for _ in plans]
    if not peak_host_bytes:
        _run_step(job, plans, hosts, is_drawn=False)
    outcomes = [rank.outcome for rank in _run_step(job, plans, hosts, is_drawn)]
    return Simulation(max(outcome.milliseconds for outcome in outcomes), outcomes)


_Over = dict[tuple[str, int, int], float]
"""When the forward or backward of a stage for a microbatch was over, on any rank."""


def _run_step(job: PipelineJob, plans: Sequence[Plan], hosts: Sequence[HostBytes], is_drawn: bool) -> list[_Rank]:
    ranks = [_Rank(job, rank, plan, host, is_drawn) for rank, (plan, host) in enumerate(zip(plans, hosts, strict=True))]
    over: _Over = {}
    running, num_over = [rank.run(over) for rank in ranks], -1
    while running:
        if len(over) == num_over:
            raise ValueError("the ranks wait for each other: their actions are not of one schedule")
        num_over = len(over)
        running = [actions for actions in running if next(actions, None) is not None]
    return ranks


class _Rank:
    def __init__(self, job: PipelineJob, rank: int, plan: Plan, host: HostBytes, is_drawn: bool) -> None:
        self._job = job.ranks[rank]
        self._rank = rank
        self._num_ranks = len(job.ranks)
        self._last_stage = sum(len(other.shapes) for other in job.ranks) - 1
        self._clocks = Clocks(job.link, is_drawn)
        self._of_actions: list[ActionTime] = []
        host.begin_step(self._clocks)
        self._executor = SimulatedExecutor(plan, self._job.shapes, self._job.bounds, self._clocks, host)

    @property
    def outcome(self) -> RankOutcome:
        clocks = self._clocks
        counters, times = self._executor.counters, tuple(self._of_actions)
        return RankOutcome(clocks.compute, clocks.stalled, counters, clocks.spans, times)

    def run(self, over: _Over) -> Iterator[bool]:
        """Run all actions; yields while another rank has to continue first."""
        for action, boundaries in self._job.of_actions():
            step = -1 if action.kind == "F" else 1
            stage, microbatch = action.chunk.stage * self._num_ranks + self._rank, action.chunk.microbatch
            before = (action.kind, stage + step, microbatch)
            if 0 <= before[1] <= self._last_stage:
                while before not in over:
                    yield True
                self._clocks.receive(over[before])
            began, stalled = self._clocks.compute, self._clocks.stalled_ms
            for boundary in boundaries:
                self._run_to(boundary)
            over[action.kind, stage, microbatch] = self._clocks.compute
            self._of_actions.append(ActionTime(self._clocks.compute - began, self._clocks.stalled_ms - stalled))
        self._executor.at(Boundary(ITERATION_END))

    def _run_to(self, boundary: Boundary) -> None:
        """Run what comes before a boundary, pass it, and run what comes right after it."""
        kind, chunk, index = boundary
        assert chunk is not None
        before, after = self._around(boundary)
        if kind is COMMIT:
            self._run(self._shape(chunk).groups[index].lead_ms, boundary, "before ")
            self._executor.open_group(GroupKey(chunk, index))
        self._run(before, boundary)
        if kind is BACKWARD_END:
            self._executor.close_group(GroupKey(chunk, index))
        self._executor.at(boundary)
        self._run(after, boundary, "after ")

    def _around(self, boundary: Boundary) -> tuple[float, float]:
        """Return the milliseconds of compute before and after a boundary."""
        kind, chunk, index = boundary
        assert chunk is not None
        shape = self._shape(chunk)
        if kind is COMMIT:
            return shape.groups[index].forward_ms, 0.0
        if kind is BACKWARD_END:
            return shape.groups[index].backward_ms, shape.groups[index].lead_backward_ms
        if kind is HEAD:
            return shape.rest_ms, shape.head_ms
        if kind is FORWARD_END:
            return (0.0 if shape.has_head else shape.rest_ms), 0.0
        if kind is LOSS_DONE:
            return shape.head_backward_ms, shape.rest_backward_ms
        return 0.0, (shape.rest_backward_ms if kind is CHUNK_BACKWARD and not shape.has_head else 0.0)

    def _run(self, milliseconds: float, boundary: Boundary, where: str = "") -> None:
        if milliseconds and self._clocks.is_drawn:
            self._clocks.run(milliseconds, f"{where}{boundary} {self._name(boundary)}".rstrip())
        elif milliseconds:
            self._clocks.run(milliseconds)

    def _name(self, boundary: Boundary) -> str:
        if boundary.chunk is None or boundary.kind not in (COMMIT, BACKWARD, BACKWARD_END):
            return ""
        return self._shape(boundary.chunk).groups[boundary.index].name

    def _shape(self, chunk: ChunkKey) -> ChunkShape:
        return self._job.shapes[chunk.stage]
