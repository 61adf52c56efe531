# SPDX-License-Identifier: Apache-2.0
"""`OwnGroups`: what one rank moves, where others, or other steps, may move more."""

from __future__ import annotations

from dataclasses import replace

from offload_engine.planning.allocations import RecordedStep
from offload_engine.planning.clocks import Link
from offload_engine.planning.memory import Job, MemoryModel
from offload_engine.planning.recompute import RecomputeOption
from offload_engine.planning.residents import residents_of
from offload_engine.planning.steps import Decision, Steps


class OwnGroups:
    """Groups of one rank, whose experts have other numbers of tokens than those of other ranks, and in each microbatch.

    Its steps are planned by the most bytes that each group has had.

    Args:
        job: with these bytes.
        model: of the memory of this rank.
        options: what it can recompute.

    Attributes:
        job: see the argument.
        options: see the argument.
    """

    def __init__(self, job: Job, model: MemoryModel, options: tuple[RecomputeOption, ...]) -> None:
        self.job: Job = job
        self.options: tuple[RecomputeOption, ...] = options
        self._model = model

    def peak_bytes(self, decision: Decision, recorded: RecordedStep) -> int:
        """Return the peak of allocated bytes if groups have the bytes that they had in a recorded step."""
        actions = tuple(action for action in self.job.actions if action.chunk.microbatch not in recorded.left_out)
        steps = Steps(replace(self.job, actions=actions), Link(), self.options)  # only planned
        job, plan, _ = steps.planned(decision)
        fewer = recorded.fewer_bytes(self.job.shapes, decision.choices.recomputed)
        residents = residents_of(job.actions, job.shapes, job.bounds, plan, sizes=fewer)
        return self._model.allocated_with(residents, 0.0)  # no release is early in a replay
