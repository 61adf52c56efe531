# SPDX-License-Identifier: Apache-2.0
"""`Releases`: finds the groups that a plan releases at memory peaks; see `drop_before_peaks` in the planner."""

from __future__ import annotations

import itertools
from collections import deque

from offload_engine.planning.copy_ins import Step
from offload_engine.planning.moves import CHUNK_BACKWARD, COMMIT, HEAD, IN, OUT, TAIL, Boundary, GroupKey
from offload_engine.planning.plan import Line


class Releases:
    """Tracks groups that have left and may not be released yet, oldest first, between two lines of a step.

    Args:
        step: the step.
        kept: the groups that do not leave, because their backward comes at once.
    """

    def __init__(self, step: Step, kept: frozenset[GroupKey]) -> None:
        self._step = step
        self._kept = kept
        self._queue: deque[GroupKey] = deque()
        self._queue_bytes = 0
        self._before_tail: list[GroupKey] = []
        self._gone: set[GroupKey] = set()  # released here, or back

    def at(self, line: Line) -> list[GroupKey]:
        """Return the groups released at `line`, oldest first; record those that leave and return there."""
        for op, group in line.moves:
            if op is OUT:
                self._queue.append(group)
                self._queue_bytes += self._step.size(group)
            elif op is IN:
                self._gone.add(group)
        released = [group for group in self._released(line.boundary) if group not in self._gone]
        self._gone.update(released)
        self._forget_released()
        return released

    def _released(self, boundary: Boundary) -> list[GroupKey]:
        kind, chunk, _ = boundary
        if kind is TAIL:
            self._before_tail = list(self._queue)
        elif kind is CHUNK_BACKWARD and self._step.bounds.max_inflight_bytes is None:
            return [g for g in itertools.takewhile(lambda g: g.chunk != chunk, self._before_tail) if g in self._queue]
        elif kind is HEAD and chunk in self._step.at_once:
            return list(self._queue)
        elif kind is COMMIT and boundary.group in self._kept:
            return self._released_for_kept(boundary.group)
        return []

    def _released_for_kept(self, kept: GroupKey) -> list[GroupKey]:
        if not self._step.shape(kept.chunk).has_head:
            return list(self._queue)
        if any(GroupKey(kept.chunk, index) in self._kept for index in range(kept.index)):
            return []
        return list(self._queue)[: self._num_layer_before(kept)]

    def _num_layer_before(self, kept: GroupKey) -> int:
        """Count the oldest groups, up to the last with the name of `kept` that is a layer older or of another chunk."""
        shape, number = self._step.group(kept), 0
        for position, group in enumerate(self._queue, 1):
            other = self._step.group(group)
            if other.name == shape.name and (group.chunk != kept.chunk or other.layer < shape.layer):
                number = position
        return number

    def _forget_released(self) -> None:
        """Forget groups that the limit in flight has released."""
        limit = self._step.inflight_limit()
        while self._step.largest_bytes and self._queue_bytes > limit:
            self._queue_bytes -= self._step.size(self._queue.popleft())
