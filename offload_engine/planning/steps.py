# SPDX-License-Identifier: Apache-2.0
"""`Steps`: plans and simulates each step of one job once; corrections of the memory model do not affect them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from offload_engine.planning.choices import Choices
from offload_engine.planning.clocks import Link
from offload_engine.planning.memory import Job
from offload_engine.planning.plan import Plan
from offload_engine.planning.planner import plan_step
from offload_engine.planning.recompute import RecomputeOption, options_of, with_recomputation
from offload_engine.planning.residents import Residents, residents_of
from offload_engine.planning.shapes import step_boundaries
from offload_engine.planning.simulate import ActionTime, PipelineJob, RankJob, RankOutcome, simulate


class Decision(NamedTuple):
    """A decision about the memory of a step."""

    choices: Choices = Choices()
    resident_bytes: int | None = None
    """Bound on the bytes of groups on the device: groups that are not kept stay while they fit. None: they leave as
    early as possible, and come back as late as possible."""


class PlannedStep(NamedTuple):
    """A step under a decision: its job with the shapes and bounds of that decision, its plan, and where groups are."""

    job: Job
    plan: Plan
    residents: Residents


@dataclass(frozen=True)
class Outcome:
    """Outcome of the simulation of a step."""

    milliseconds: float
    stalls: dict[str, float]
    """See `RankOutcome`, like the next one."""
    of_actions: tuple[ActionTime, ...] = ()

    @property
    def stalled_ms(self) -> float:
        """Return how long compute waits for copies."""
        return sum(self.stalls.values())

    @property
    def busy_ms(self) -> float:
        """Return how long the step takes without these waits."""
        return self.milliseconds - self.stalled_ms


class Steps:
    """Plans and simulates the steps of one job, each decision once.

    Args:
        job: the job, with bytes and times.
        link: the link that it copies over.
        options: what can be recomputed.

    Attributes:
        wasted_bytes: by decision, what the allocator would reserve in vain, if the step of it was replayed; in order.
        arena_bytes: by decision, the arena that the allocator is to reserve before its steps, once that is known.
    """

    def __init__(self, job: Job, link: Link, options: tuple[RecomputeOption, ...] = ()) -> None:
        self.job: Job = job
        self._link = link
        self._options = options
        self.wasted_bytes: dict[Decision, int] = {}
        self.arena_bytes: dict[Decision, int] = {}
        self._planned: dict[Decision, PlannedStep] = {}
        self._outcomes: dict[tuple[Decision, float], Outcome] = {}
        self._peak_host_bytes = 0  # with everything offloaded, which the measured step has done
        # Bytes and times differ from decision to decision, boundaries do not.
        self._of_actions = tuple(tuple(step_boundaries([action], job.shapes)[:-1]) for action in job.actions)
        self._boundaries = tuple(step_boundaries(job.actions, job.shapes))

    def wasted_with(self, decision: Decision) -> int | None:
        """Return what the allocator would reserve in vain, or did in the last replay with other room.

        None: not known, or with everything offloaded, as measured.
        """
        if decision == Decision():
            return self.wasted_bytes.get(decision)
        like = (wasted for other, wasted in reversed(self.wasted_bytes.items()) if other.choices == decision.choices)
        return self.wasted_bytes.get(decision, next(like, None))

    def planned(self, decision: Decision) -> PlannedStep:
        """Return the plan of a step, and where its groups are."""
        found = self._planned.get(decision)
        if found is None:
            found = self._planned[decision] = self._plan(decision)
        return found

    def outcome(self, decision: Decision, slower: float = 1.0) -> Outcome:
        """Return the simulated outcome of a step, with compute that takes `slower` times as long, in units of that."""
        floor = Decision(), 1.0
        if floor not in self._outcomes:
            rank = self._simulated(*floor, 0)
            self._outcomes[floor] = Outcome(rank.milliseconds, rank.stalls, rank.of_actions)
            self._peak_host_bytes = rank.counters.peak_host_bytes
        if (decision, slower) not in self._outcomes:
            rank = self._simulated(decision, slower, self._peak_host_bytes)
            self._outcomes[decision, slower] = Outcome(rank.milliseconds, rank.stalls, rank.of_actions)
        return self._outcomes[decision, slower]

    def _simulated(self, decision: Decision, slower: float, peak_host_bytes: int) -> RankOutcome:
        job, plan, _ = self.planned(decision)
        rank = RankJob(job.actions, job.shapes, job.bounds, self._of_actions)
        link = replace(self._link, out_gbps=slower * self._link.out_gbps, in_gbps=slower * self._link.in_gbps)
        pipeline = PipelineJob((rank,), link)
        return simulate(pipeline, [plan], is_drawn=False, peak_host_bytes=peak_host_bytes).ranks[0]

    def _plan(self, decision: Decision) -> PlannedStep:
        options = options_of(self._options, decision.choices.recomputed)
        job = replace(self.job, shapes=with_recomputation(self.job.shapes, options)).within(decision.resident_bytes)
        plan = plan_step(
            job.actions,
            job.shapes,
            job.bounds,
            choices=decision.choices,
            is_combined=job.is_combined,
            boundaries=self._boundaries,
        )
        return PlannedStep(job, plan, residents_of(job.actions, job.shapes, job.bounds, plan, self._boundaries))
