# SPDX-License-Identifier: Apache-2.0
"""Computes how many bytes of groups are on the device at each boundary of a planned step, without clocks.

Counts in the order of the host, in which the allocator is called, as if no copy-out completed before compute must wait
for it. This is an upper bound, and exact for a host that runs ahead of its device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offload_engine.planning.moves import (
    BACKWARD,
    BACKWARD_END,
    COMMIT,
    DROP,
    IN,
    OUT,
    Boundary,
    GroupKey,
    PlannedMove,
)
from offload_engine.planning.plan import Plan
from offload_engine.planning.shapes import Bounds, GroupShape, Shapes, largest_bytes, step_boundaries
from offload_engine.schedule import Action


@dataclass(frozen=True, eq=False)  # by identity it is a key, whatever it has
class Residents:
    """Bytes of groups on the device, in one step."""

    before: dict[Boundary, int]
    """At each boundary, before its moves; includes recomputed bytes."""
    most: int
    """At any time; without recomputed bytes, which never move."""
    moved_bytes: int
    """Copied out."""


def residents_of(
    actions: Sequence[Action],
    shapes: Shapes,
    bounds: Bounds,
    plan: Plan,
    boundaries: Sequence[Boundary] | None = None,
    sizes: Mapping[GroupKey, int] | None = None,
) -> Residents:
    """Return the bytes of groups on the device in a planned step.

    A group counts from its commit, after all of it was saved, to the end of its backward.

    Args:
        actions: schedule of the rank.
        shapes: shapes of its chunks.
        bounds: bounds of the plan.
        plan: plan of the step.
        boundaries: boundaries of the step, if known, as `step_boundaries` lists them.
        sizes: bytes of groups that have fewer than their shapes, by which the step is planned.
    """
    walk = _Walk(shapes, bounds, sizes)
    found = {}
    for boundary in boundaries or step_boundaries(actions, shapes):
        walk.come_to(boundary)
        found[boundary] = walk.resident_bytes + walk.recomputed_bytes
        walk.move(boundary, plan)
    moved = [move.group for _, move in plan.moves() if move.op is OUT]
    return Residents(found, walk.most_bytes, sum(map(walk.size, moved)))


def groups_before(
    actions: Sequence[Action], shapes: Shapes, bounds: Bounds, plan: Plan, at: Boundary
) -> frozenset[GroupKey]:
    """Return the groups that are on the device at the boundary `at`; see `residents_of` for the arguments."""
    walk = _Walk(shapes, bounds)
    for boundary in step_boundaries(actions, shapes):
        walk.come_to(boundary)
        if boundary == at:
            break
        walk.move(boundary, plan)
    return walk.resident_groups


def moves_in_memory(
    actions: Sequence[Action], shapes: Shapes, bounds: Bounds, plan: Plan, sizes: Mapping[GroupKey, int]
) -> list[tuple[Boundary, PlannedMove]]:
    """Return the releases and copy-ins of a step, in order; see `residents_of` for the arguments.

    Unlike the moves of the plan, these are what the allocator sees: a group that stays, or is recalled, has none.
    """
    walk, found = _Walk(shapes, bounds, sizes), []
    for boundary in step_boundaries(actions, shapes):
        walk.come_to(boundary)
        walk.move(boundary, plan)
        found += [(boundary, move) for move in walk.performed]
        walk.performed.clear()
    return found


class _Walk:
    """Tracks where groups are between two boundaries.

    Attributes:
        performed: releases and copy-ins so far.
    """

    def __init__(self, shapes: Shapes, bounds: Bounds, sizes: Mapping[GroupKey, int] | None = None) -> None:
        self.performed: list[PlannedMove] = []
        self.resident_bytes = self.most_bytes = self.recomputed_bytes = 0
        self._recomputed: set[GroupKey] = set()  # recomputed groups on the device
        self._shapes = shapes
        self._sizes: Mapping[GroupKey, int] = {} if sizes is None else sizes
        self._largest = largest_bytes(shapes)
        self._budget = bounds.resident_bytes
        self._inflight_limit = bounds.inflight_limit(self._largest)
        self._leaving: deque[GroupKey] = deque()  # oldest first; includes released and recalled groups
        self._leaving_bytes = 0
        self._is_leaving: set[GroupKey] = set()
        self._away: set[GroupKey] = set()
        self._alive: set[GroupKey] = set()

    @property
    def resident_groups(self) -> frozenset[GroupKey]:
        """Return the groups that are on the device."""
        return frozenset(self._alive - self._away)

    def come_to(self, boundary: Boundary) -> None:
        """Count what compute has saved or freed since the previous boundary."""
        if boundary.kind is COMMIT:
            self._alive.add(boundary.group)
            self._hold(boundary.group)
        elif boundary.kind is BACKWARD_END:
            self._is_leaving.discard(boundary.group)
            self._alive.discard(boundary.group)
            self.resident_bytes -= self.size(boundary.group)
            if boundary.group in self._recomputed:
                self._recomputed.discard(boundary.group)
                self.recomputed_bytes -= self._shape(boundary.group).recomputed_bytes

    def move(self, boundary: Boundary, plan: Plan) -> None:
        """Perform the moves of a boundary, as the executor does."""
        self._make_room()
        if boundary.kind is BACKWARD:
            self._bring_back(boundary.group)
            self._recompute(boundary.group)
        for op, group in plan.at(boundary):
            if op is OUT:
                self._copy_out(group)
            elif op is IN:
                self._bring_back(group)
            else:
                self._release(group)

    def _copy_out(self, group: GroupKey) -> None:
        self._leaving.append(group)
        self._is_leaving.add(group)
        self._leaving_bytes += self.size(group)
        self._make_room()

    def _make_room(self) -> None:
        """Release the oldest leaving groups, as the executor does whatever the plan says."""
        while self._leaving and self._is_over():
            oldest = self._leaving.popleft()
            self._leaving_bytes -= self.size(oldest)
            self._release(oldest)

    def _is_over(self) -> bool:
        if self._budget is not None:
            return self.resident_bytes + self._largest > self._budget
        return self._leaving_bytes > self._inflight_limit

    def _release(self, group: GroupKey) -> None:
        if group in self._is_leaving:
            self._is_leaving.discard(group)
            self._away.add(group)
            self.performed.append(PlannedMove(DROP, group))
            self.resident_bytes -= self.size(group)

    def _bring_back(self, group: GroupKey) -> None:
        self._is_leaving.discard(group)
        if group in self._away:
            self._away.discard(group)
            self.performed.append(PlannedMove(IN, group))
            self._hold(group)

    def _hold(self, group: GroupKey) -> None:
        self.resident_bytes += self.size(group)
        self.most_bytes = max(self.most_bytes, self.resident_bytes)

    def _recompute(self, last: GroupKey) -> None:
        """Count what the backward of a layer, which begins with its last group, recomputes."""
        layer = self._shape(last).layer
        for index in range(last.index, -1, -1):
            group = GroupKey(last.chunk, index)
            shape = self._shape(group)
            if shape.layer != layer or group in self._recomputed:
                break
            if shape.recomputed_bytes:
                self._recomputed.add(group)
                self.recomputed_bytes += shape.recomputed_bytes

    def size(self, group: GroupKey) -> int:
        """Return the bytes of a group."""
        nbytes = self._sizes.get(group)
        return self._shape(group).nbytes if nbytes is None else nbytes

    def _shape(self, group: GroupKey) -> GroupShape:
        return self._shapes[group.chunk.stage].groups[group.index]
