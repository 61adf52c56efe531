# SPDX-License-Identifier: Apache-2.0
"""Decides when copy-ins are issued: in the order of the backward, no further ahead of it than a horizon."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Protocol

from offload_engine.planning.choices import Choices
from offload_engine.planning.moves import BACKWARD, BACKWARD_END, FORWARD, LOSS_DONE, Boundary, GroupKey
from offload_engine.planning.shapes import Bounds, ChunkShape, GroupShape, Shapes, bringing_groups
from offload_engine.schedule import Action, ChunkKey


class Step(NamedTuple):
    """One rank's step: the input of every pass of the planner."""

    actions: tuple[Action, ...]
    shapes: Shapes
    bounds: Bounds
    is_combined: bool
    """Forward and backward of two chunks run together."""
    at_once: frozenset[ChunkKey]
    """Chunks whose backward follows their forward at once."""
    largest_bytes: int
    """Bytes of the largest group; 0: sizes are unknown, and every group counts as one byte."""
    choices: Choices = Choices()

    def shape(self, chunk: ChunkKey) -> ChunkShape:
        """Return the shape of a chunk."""
        return self.shapes[chunk.stage]

    def group(self, group: GroupKey) -> GroupShape:
        """Return the shape of a group."""
        return self.shapes[group.chunk.stage].groups[group.index]

    def size(self, group: GroupKey) -> int:
        """Return the bytes of a group, or 1 where no bytes are known."""
        return self.group(group).nbytes if self.largest_bytes else 1

    def inflight_limit(self) -> int:
        """Return how many bytes of copy-out may be in flight, in the unit of `size`."""
        return self.bounds.inflight_limit(self.largest_bytes or 1)


class Room(Protocol):
    """Bounds the groups that return ahead of their backward."""

    def has_room(self, group: GroupKey, nbytes: int, is_in_forward: bool) -> bool:
        """Return whether `group` may come back now, or be counted on to stay.

        Args:
            group: the next group.
            nbytes: its bytes; 0: it is on the device.
            is_in_forward: no backward was reached since a forward began.
        """

    def note_issued(self, group: GroupKey, nbytes: int) -> None:
        """Note that `group` comes back, or may stay, ahead of its backward; see `has_room` for `nbytes`."""

    def note_reached(self, group: GroupKey) -> None:
        """Note that the backward of `group` begins."""


class HorizonRoom:
    """Allows `limit` bytes ahead, and always one group; 0: none ahead."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ahead: dict[GroupKey, int] = {}  # bytes of groups that are issued and not reached
        self._ahead_bytes = 0

    def has_room(self, group: GroupKey, nbytes: int, is_in_forward: bool) -> bool:
        """See `Room`."""
        ahead = self._ahead_bytes
        return self._limit > 0 and (ahead == 0 or nbytes == 0 or ahead + nbytes <= self._limit)

    def note_issued(self, group: GroupKey, nbytes: int) -> None:
        """See `Room`."""
        self._ahead[group] = nbytes
        self._ahead_bytes += nbytes

    def note_reached(self, group: GroupKey) -> None:
        """See `Room`."""
        self._ahead_bytes -= self._ahead.pop(group, 0)


class CopyInOrder:
    """Walks the boundaries of a step and says which groups to bring back at each.

    Args:
        step: the step.
        away: the groups to bring back; read at each boundary, and changed by the caller.
        room: bounds the groups that return ahead.
        is_last_layer_first: of a chunk whose backward has not begun, only the last layer comes back; and after a tail a
            group comes back when the backward is at the last of its name, no earlier.
    """

    def __init__(self, step: Step, away: Collection[GroupKey], room: Room, is_last_layer_first: bool) -> None:
        self._step = step
        self._away = away
        self._room = room
        self._is_last_layer_first = is_last_layer_first
        self._positions = {action: position for position, action in enumerate(step.actions)}
        self._last_index_by_name = [shape.last_index_by_name() for shape in step.shapes]
        self._brought_by = [
            bringing_groups([(g.name, g.layer) for g in shape.groups], step.is_combined) for shape in step.shapes
        ]
        self._next: dict[ChunkKey, int] = {}  # index of the group to bring back next; counts down
        self._near: dict[ChunkKey, int] = {}  # index that the backward has reached, or near which it begins
        self._window: list[ChunkKey] = []  # chunks to bring back now, soonest first
        self._in_backward: ChunkKey | None = None  # reached last; no forward has begun since
        self._issued: list[GroupKey] = []

    def at(self, boundary: Boundary) -> list[GroupKey]:
        """Return the groups to bring back at `boundary`, in order; a group whose backward begins comes first."""
        self._issued = []
        kind, chunk, index = boundary
        if chunk is None or kind not in (FORWARD, LOSS_DONE, BACKWARD, BACKWARD_END):
            return []
        if kind is BACKWARD_END:
            if not self._awaits_tail(GroupKey(chunk, index)):
                return []
            self._near[chunk] = min(self._near[chunk], index)
        elif kind is FORWARD:
            self._begin_forward(chunk)
        else:
            self._enter_backward(chunk)
        if kind is BACKWARD:
            self._reach(GroupKey(chunk, index))
        self._advance()
        return self._issued

    def _begin_forward(self, chunk: ChunkKey) -> None:
        position = self._positions[Action("F", chunk)]
        self._next[chunk] = len(self._step.shape(chunk).groups) - 1
        shape = self._step.shape(chunk)
        last = self._last_index_by_name[chunk.stage].values()
        near = min(last, default=0) if shape.tail_index is None else shape.tail_index
        near += shape.awaits_tail
        self._near[chunk] = len(shape.groups) if self._step.is_combined else near  # see `ChunkProgress.end_forward`
        self._in_backward = None
        self._window = self._upcoming(position, {chunk})

    def _enter_backward(self, chunk: ChunkKey) -> None:
        if self._in_backward != chunk:
            self._in_backward = chunk
            position = self._positions[Action("B", chunk)]
            self._window = [chunk, *self._upcoming(position, self._beside(position))]

    def _beside(self, position: int) -> set[ChunkKey]:
        """Find the chunk whose forward runs together with the backward at `position`."""
        before = self._step.actions[position - 1]
        return {before.chunk} if self._step.is_combined and before.kind == "F" else set()

    def _upcoming(self, position: int, running: set[ChunkKey]) -> list[ChunkKey]:
        """List the chunks whose backward comes after `position` and before any other forward, soonest first.

        A forward that runs together with the backward after it does not come before that one.
        """
        chunks: list[ChunkKey] = []
        num_forwards_to_pass = int(self._step.is_combined)
        for action in self._step.actions[position + 1 :]:
            if action.kind == "F" and num_forwards_to_pass:
                num_forwards_to_pass -= 1
                continue
            if action.kind == "F" or action.chunk not in self._next or action.chunk in running:
                break
            chunks.append(action.chunk)
        return chunks

    def _reach(self, group: GroupKey) -> None:
        chunk, index = group
        if not self._awaits_tail(group):
            self._near[chunk] = min(self._near[chunk], index)
        self._room.note_reached(group)
        if self._next[chunk] == index:  # not ahead, but at the last moment
            self._next[chunk] -= 1
            if group in self._away:
                self._issued.append(group)

    def _awaits_tail(self, group: GroupKey) -> bool:
        """Return whether the end of this group's backward, not its beginning, brings the first group back."""
        shape = self._step.shape(group.chunk)
        return self._is_last_layer_first and group.index == shape.tail_index and shape.awaits_tail

    def _advance(self) -> None:
        while self._window:
            if self._next[self._window[0]] < 0:
                self._window.pop(0)
            elif not self._bring_next(self._window[0]):
                return

    def _bring_next(self, chunk: ChunkKey) -> bool:
        """Bring back one more group of `chunk`; False if it may not come yet."""
        group = GroupKey(chunk, self._next[chunk])
        is_away = group in self._away
        if not (self._is_due(group, is_away) or self._is_needed_first(group)):
            return False
        nbytes = self._step.size(group) if is_away else 0
        if not self._room.has_room(group, nbytes, self._in_backward is None):
            return False
        self._next[chunk] -= 1
        self._room.note_issued(group, nbytes)
        if is_away:
            self._issued.append(group)
        return True

    def _is_due(self, group: GroupKey, is_away: bool) -> bool:
        """Return whether the backward is near `group`; a group that never left may be passed over."""
        if group.chunk != self._in_backward:
            return False
        return self._brought_by[group.chunk.stage][group.index] >= self._near[group.chunk] or not is_away

    def _is_needed_first(self, group: GroupKey) -> bool:
        """Return whether `group` may come back before the backward is near any group of its chunk."""
        if not self._is_last_layer_first:
            return True
        groups = self._step.shape(group.chunk).groups
        shape = groups[group.index]
        if shape.layer == groups[-1].layer != -1:
            return True
        return self._last_index_by_name[group.chunk.stage][shape.name] == group.index
