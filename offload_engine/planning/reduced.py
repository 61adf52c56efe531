# SPDX-License-Identifier: Apache-2.0
"""`ReducedJob`: the job that an engine sees once modules are recomputed, beside the one that was recorded."""

from __future__ import annotations

from dataclasses import replace

from offload_engine.planning.allocations import RecordedStep
from offload_engine.planning.choices import slots_of
from offload_engine.planning.memory import Job
from offload_engine.planning.moves import BACKWARD, COMMIT, HELD, LAUNCH, Boundary, GroupKey
from offload_engine.planning.plan import Plan
from offload_engine.planning.planner import plan_step
from offload_engine.planning.recompute import RecomputeOption, with_recomputation
from offload_engine.planning.shapes import ChunkShape
from offload_engine.planning.steps import Decision


class ReducedJob:
    """A job without the groups that recomputation leaves nothing of; maps its groups and boundaries to the others.

    Args:
        job: as recorded, with everything offloaded.
        decision: of the steps.
        options: what they recompute.

    Attributes:
        job: the reduced one, under the bounds of the decision.
        plan: of a step of it.
        replaced: the groups of the recorded job that are recomputed together, with what they are recomputed by.
    """

    def __init__(self, job: Job, decision: Decision, options: tuple[RecomputeOption, ...]) -> None:
        self.replaced: dict[tuple[GroupKey, ...], RecomputeOption] = _groups_of(job, options)
        self._shapes, self._recomputed = job.shapes, decision.choices.recomputed
        shapes = with_recomputation(job.shapes, options)
        self._saved_bytes = [[group.nbytes for group in shape.groups] for shape in shapes]
        gone = [_without_bytes(stage, shape, decision) for stage, shape in enumerate(shapes)]
        self._left = [
            [index for index in range(len(shape.groups)) if index not in none]
            for shape, none in zip(shapes, gone, strict=True)
        ]
        self._counts = [len(shape.groups) for shape in shapes]
        self.job: Job = replace(job, shapes=tuple(map(_without, shapes, gone))).within(decision.resident_bytes)
        self.plan: Plan = plan_step(
            job.actions, self.job.shapes, self.job.bounds, choices=decision.choices, is_combined=job.is_combined
        )

    def group(self, group: GroupKey) -> GroupKey:
        """Return a group of the recorded step."""
        return GroupKey(group.chunk, self._left[group.chunk.stage][group.index])

    def fewer_bytes(self, step: RecordedStep) -> dict[GroupKey, int]:
        """Return the bytes of groups that had fewer in the recorded step than by the shapes of the job."""
        fewer = step.fewer_bytes(self._shapes, self._recomputed)
        chunks = {group.chunk for group in fewer}
        groups = (GroupKey(chunk, index) for chunk in chunks for index in range(len(self._left[chunk.stage])))
        return {group: fewer[found] for group in groups if (found := self.group(group)) in fewer}

    def saved_bytes(self, groups: tuple[GroupKey, ...]) -> int:
        """Return how many bytes groups of the recorded step still save, once they are recomputed."""
        return sum(self._saved_bytes[group.chunk.stage][group.index] for group in groups)

    def boundary(self, boundary: Boundary) -> Boundary:
        """Return the boundary of the recorded step at which this one is; a recomputed module is one group."""
        kind, chunk, index = boundary
        if chunk is None or index < 0:
            return boundary
        if kind is HELD or kind is LAUNCH:
            left = self._left[chunk.stage]
            return Boundary(kind, chunk, left[index] if index < len(left) else self._counts[chunk.stage])
        group = self.group(boundary.group)
        if kind is COMMIT or kind is BACKWARD:
            group = max([group, *(max(groups) for groups in self.replaced if group in groups)])
        return Boundary(kind, *group)


def _groups_of(job: Job, options: tuple[RecomputeOption, ...]) -> dict[tuple[GroupKey, ...], RecomputeOption]:
    chunks = dict.fromkeys(action.chunk for action in job.actions)
    slots = [slots_of(stage, shape.groups) for stage, shape in enumerate(job.shapes)]
    found = {}
    for option in options:
        for chunk in chunks:
            own = [GroupKey(chunk, i) for i, slot in enumerate(slots[chunk.stage]) if slot in option.replaces]
            if own:
                found[tuple(own)] = option
    return found


def _without_bytes(stage: int, shape: ChunkShape, decision: Decision) -> frozenset[int]:
    slots = slots_of(stage, shape.groups)
    recomputed = decision.choices.recomputed
    return frozenset(
        index for index, group in enumerate(shape.groups) if slots[index] in recomputed and not group.nbytes
    )


def _without(shape: ChunkShape, gone: frozenset[int]) -> ChunkShape:
    def left(count: int) -> int:
        return count - sum(index < count for index in gone)

    def maybe_left(count: int | None) -> int | None:
        return None if count is None else left(count)

    return replace(
        shape,
        groups=tuple(
            replace(group, unkeep_count=maybe_left(group.unkeep_count))
            for index, group in enumerate(shape.groups)
            if index not in gone
        ),
        tail_index=maybe_left(shape.tail_index),
        launch_counts=tuple(dict.fromkeys(map(left, shape.launch_counts))),
        held_counts=tuple(dict.fromkeys(map(left, shape.held_counts))),
    )
