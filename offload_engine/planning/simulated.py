# SPDX-License-Identifier: Apache-2.0
"""Executes the plan of one rank on clocks, with the decisions that an engine makes whatever the plan."""

from __future__ import annotations

import enum
from collections import deque
from typing import NamedTuple

from offload_engine.planning.clocks import Clocks
from offload_engine.planning.host_bytes import HostBytes, Lent
from offload_engine.planning.moves import (
    BACKWARD,
    COMMIT,
    DROP,
    IN,
    ITERATION_END,
    OUT,
    Boundary,
    GroupKey,
    PlannedMove,
)
from offload_engine.planning.plan import Plan
from offload_engine.planning.shapes import Bounds, Shapes, largest_bytes


class Place(enum.Enum):
    """Where the bytes of a group are."""

    RESIDENT = enum.auto()
    LEAVING = enum.auto()
    ON_HOST = enum.auto()
    ARRIVING = enum.auto()


class Group:
    """One group of the step, from its start to the end of its backward."""

    def __init__(self, key: GroupKey, name: str, nbytes: int) -> None:
        self.key: GroupKey = key
        self.name: str = name
        self.nbytes: int = nbytes
        self.place: Place = Place.RESIDENT
        self.produced: float = 0.0
        """When its forward is over on the device, in ms."""
        self.copied_out: float = 0.0
        """When its copy-out completes, in ms."""
        self.copied_in: float = 0.0
        """When its copy-in completes, in ms."""
        self.lent: Lent | None = None
        """Its host bytes; or those that its copy-in reads."""


class Counters(NamedTuple):
    """Bytes and misses of one step."""

    peak_resident_bytes: int
    peak_host_bytes: int
    copied_out_bytes: int
    copied_in_bytes: int
    num_misses: int
    """Groups on host when their backward began."""


class SimulatedExecutor:
    """Performs planned moves, and whatever the plan says:

    - Groups whose copy-out is complete are released at the next boundary.
    - Compute waits for the oldest copy-outs beyond the limit in flight, except under a budget of resident bytes, where
      the plan says when.
    - A group that is on host when its backward begins is copied in then.
    """

    def __init__(self, plan: Plan, shapes: Shapes, bounds: Bounds, clocks: Clocks, host: HostBytes) -> None:
        self.groups: dict[GroupKey, Group] = {}
        self._plan = plan
        self._shapes = shapes
        self._limit = bounds.inflight_limit(largest_bytes(shapes))
        self._has_budget = bounds.resident_bytes is not None
        self._clocks = clocks
        self._host = host
        self._queue: deque[Group] = deque()  # copied out and perhaps not released, oldest first
        self._queue_bytes = 0
        self._resident_bytes = self._peak_resident_bytes = 0
        self._out_bytes = self._in_bytes = self._num_misses = 0
        self._waits_at = ""

    @property
    def counters(self) -> Counters:
        """Return the counts so far."""
        peaks = self._peak_resident_bytes, self._host.peak_lent_bytes
        return Counters(*peaks, self._out_bytes, self._in_bytes, self._num_misses)

    def open_group(self, key: GroupKey) -> None:
        """Begin the forward of a group: its bytes are resident from now on."""
        shape = self._shapes[key.chunk.stage].groups[key.index]
        self.groups[key] = Group(key, shape.name, shape.nbytes)
        self._hold(shape.nbytes)

    def close_group(self, key: GroupKey) -> None:
        """End the backward of a group: its bytes are released, once no copy reads them any more."""
        group = self.groups.pop(key)
        self._clocks.wait(group.copied_out if group.place is Place.RESIDENT else 0.0, f"END {group.name}")
        self._resident_bytes -= group.nbytes

    def at(self, boundary: Boundary) -> None:
        """Pass a boundary."""
        self._waits_at = boundary.kind.name
        moves = self._plan.at(boundary)
        self._release_due()
        if boundary.kind is COMMIT:
            self.groups[boundary.group].produced = self._clocks.compute
        if boundary.kind is BACKWARD:
            own = self.groups[boundary.group]
            self._reach(own)
            moves = tuple(move for move in moves if move != PlannedMove(IN, own.key))
        for move in moves:
            self._do(move)
        self._release_due()
        if boundary.kind is ITERATION_END:
            self._release_due(0)

    def _do(self, move: PlannedMove) -> None:
        group = self.groups[move.group]
        if move.op is OUT and group.nbytes:
            self._copy_out(group)
        elif move.op is DROP:
            self._release(group)
        elif move.op is IN:
            self._bring_back(group)

    def _reach(self, group: Group) -> None:
        self._num_misses += group.place is Place.ON_HOST
        self._bring_back(group)
        if group.place is Place.ARRIVING:
            self._clocks.wait(group.copied_in, f"{self._waits_at} {group.name}")
            assert group.lent is not None
            self._host.note_awaited(group.lent)
            group.place, group.copied_out = Place.RESIDENT, 0.0

    def _copy_out(self, group: Group) -> None:
        group.lent = self._host.lend(group.nbytes)
        after = max(group.produced, group.lent.free_at)
        group.copied_out = self._clocks.copy_out(group.nbytes, after, str(group.key))
        group.place = Place.LEAVING
        self._queue.append(group)
        self._queue_bytes += group.nbytes
        self._out_bytes += group.nbytes

    def _bring_back(self, group: Group) -> None:
        if group.place is Place.LEAVING:  # recalled: its copy-out still reads the bytes
            group.place = Place.RESIDENT
            self._return_bytes(group, group.copied_out, is_unawaited=False)
        elif group.place is Place.ON_HOST:
            self._hold(group.nbytes)
            group.copied_in = self._clocks.copy_in(group.nbytes, str(group.key))
            group.place = Place.ARRIVING
            self._in_bytes += group.nbytes
            self._return_bytes(group, group.copied_in, is_unawaited=True)

    def _return_bytes(self, group: Group, read_until: float, is_unawaited: bool) -> None:
        assert group.lent is not None
        self._host.return_bytes(group.lent, read_until, is_unawaited)

    def _release_due(self, limit: int | None = None) -> None:
        """Release groups whose copy-out is complete, and the oldest others beyond the limit."""
        limit = self._limit if limit is None else limit
        while self._queue and (self._is_over(limit) or self._clocks.is_over(self._queue[0].copied_out)):
            group = self._queue.popleft()
            self._queue_bytes -= group.nbytes
            self._release(group)

    def _is_over(self, limit: int) -> bool:
        return self._queue_bytes > limit and not self._has_budget

    def _release(self, group: Group) -> None:
        if group.place is Place.LEAVING:
            self._clocks.wait(group.copied_out, f"{self._waits_at} {group.name}")
            group.place = Place.ON_HOST
            self._resident_bytes -= group.nbytes

    def _hold(self, nbytes: int) -> None:
        self._resident_bytes += nbytes
        self._peak_resident_bytes = max(self._peak_resident_bytes, self._resident_bytes)
