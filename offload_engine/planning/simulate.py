# SPDX-License-Identifier: Apache-2.0
"""Simulates the plans of all ranks of a pipeline: how long a step takes, where compute waits, where the bytes are.

Kernels and copies advance clocks; ranks wait for each other where the schedule says so. If forward and backward of two
chunks run together, they are simulated one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def run_in_order(ranks: Sequence[Sequence[Action]], run: Callable[[int, int, float], float]) -> None:
    """Run the actions of all ranks, each behind that of another stage that it awaits.

    Args:
        ranks: the actions of each, in order; for stages see `PipelineJob`.
        run: runs one: of which rank, its position, and when the awaited one was over, or 0. Returns when it is over.

    Raises:
        ValueError: if the ranks wait for each other for ever.
    """
    num_ranks = len(ranks)
    stages = {action.chunk.stage * num_ranks + rank for rank, actions in enumerate(ranks) for action in actions}
    over: dict[tuple[str, int, int], float] = {}  # when an action of a stage and a microbatch was over
    positions, num_over = [0] * num_ranks, -1
    while len(over) > num_over:
        num_over = len(over)
        for rank, actions in enumerate(ranks):
            while positions[rank] < len(actions):
                kind, chunk = actions[positions[rank]]
                stage = chunk.stage * num_ranks + rank
                awaited = kind, stage + (-1 if kind == "F" else 1), chunk.microbatch
                if awaited[1] in stages and awaited not in over:
                    break
                over[kind, stage, chunk.microbatch] = run(rank, positions[rank], over.get(awaited, 0.0))
                positions[rank] += 1
    if any(position < len(actions) for position, actions in zip(positions, ranks, strict=True)):
        raise ValueError("the ranks wait for each other: their actions are not of one schedule")


def _run_step(job: PipelineJob, plans: Sequence[Plan], hosts: Sequence[HostBytes], is_drawn: bool) -> list[_Rank]:
    each = zip(job.ranks, plans, hosts, strict=True)
    ranks = [_Rank(own, job.link, plan, host, is_drawn) for own, plan, host in each]

    def run(rank: int, position: int, received: float) -> float:
        return ranks[rank].run(position, received)

    run_in_order([rank.actions for rank in job.ranks], run)
    for rank in ranks:
        rank.end()
    return ranks


class _Rank:
    def __init__(self, job: RankJob, link: Link, plan: Plan, host: HostBytes, is_drawn: bool) -> None:
        self._job = job
        self._boundaries = job.boundaries or [step_boundaries([action], job.shapes)[:-1] for action in job.actions]
        self._clocks = Clocks(link, is_drawn)
        self._of_actions: list[ActionTime] = []
        host.begin_step(self._clocks)
        self._executor = SimulatedExecutor(plan, self._job.shapes, self._job.bounds, self._clocks, host)

    @property
    def outcome(self) -> RankOutcome:
        clocks = self._clocks
        counters, times = self._executor.counters, tuple(self._of_actions)
        return RankOutcome(clocks.compute, clocks.stalled, counters, clocks.spans, times)

    def run(self, position: int, received: float) -> float:
        """Run the action at this position, behind what another rank has sent; return when it is over."""
        clocks = self._clocks
        clocks.receive(received)
        began, stalled = clocks.compute, clocks.stalled_ms
        for boundary in self._boundaries[position]:
            self._run_to(boundary)
        self._of_actions.append(ActionTime(clocks.compute - began, clocks.stalled_ms - stalled))
        return clocks.compute

    def end(self) -> None:
        """End the step behind the last action."""
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
