# SPDX-License-Identifier: Apache-2.0
"""Fits a plan into a budget of resident bytes: groups that fit stay, others leave late and return early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from offload_engine.planning.copy_ins import CopyInOrder, Step
from offload_engine.planning.moves import (
    BACKWARD_END,
    COMMIT,
    DROP,
    IN,
    OUT,
    GroupKey,
    PlannedMove,
)
from offload_engine.planning.plan import Line

SHARE_IN_FORWARD: Final = 0.25
"""Share of the budget for copy-ins during a forward: with all of it, the forward would wait for its own copy-outs."""


def fit_resident_bytes(lines: Sequence[Line], step: Step, limit_bytes: int) -> list[Line]:
    """Fit a step into `limit_bytes` of groups on the device, including the running one.

    - A group is released only if another one, as large as the largest, would not fit, also for groups that return in a
      backward. The oldest is released, whose copy-out has had the most time. (Releasing the group that is needed last
      makes compute wait for copies: the simulator's step takes 1.023 instead of 1.011 times no offload, with 2000 MiB
      for five modules.)
    - A group that is not released before its backward does not leave at all. A useless copy would load the link, and a
      backward that has used the group would wait for that copy, which is queued behind all the others. (A reactive
      policy has to guess how much is still to be saved. A plan knows.)
    - Copy-ins are issued as long as there is room. During a forward they get a quarter of the budget, and always one
      group: with all of the room taken, that forward would wait for the copies of the groups that it saves.

    If all groups that may leave have left and still do not fit, the step exceeds the budget.
    """
    walk = _Walk(lines, step, limit_bytes)
    new = [walk.at(position) for position in range(len(lines))]
    return [
        Line(line.boundary, tuple(move for move in moves if move.group in walk.released) if moves else ())
        for line, moves in zip(lines, new, strict=True)
    ]


class _Walk:
    """Tracks the groups on the device between two lines of a step; also the `Room` of its copy-ins."""

    def __init__(self, lines: Sequence[Line], step: Step, limit_bytes: int) -> None:
        self.released: set[GroupKey] = set()
        """Groups that had to leave."""
        self._lines = lines
        self._step = step
        self._limit = limit_bytes
        self._resident_bytes = self._ahead_bytes = 0
        self._leaving: dict[GroupKey, int] = {}  # released when room is needed; in order of their copy-outs
        self._ahead: dict[GroupKey, int] = {}
        self._order = CopyInOrder(step, self.released, self, is_last_layer_first=False)

    def at(self, position: int) -> tuple[PlannedMove, ...]:
        """Return the moves of the line at `position`; lines come in order."""
        boundary, moves = self._lines[position]
        leaving = [move for move in moves if move.op is OUT]
        for move in leaving:
            self._leaving[move.group] = self._step.size(move.group)
        if boundary.kind is BACKWARD_END:
            self._resident_bytes -= self._step.size(boundary.group)
        released = self._make_room()
        self._resident_bytes += self._begun_behind(position)
        coming = self._order.at(boundary)
        self._bring_back(coming)
        if not (leaving or released or coming):
            return ()
        return (
            *leaving,
            *(PlannedMove(DROP, group) for group in released),
            *(PlannedMove(IN, group) for group in coming),
        )

    def has_room(self, group: GroupKey, nbytes: int, is_in_forward: bool) -> bool:
        """See `Room`."""
        held_bytes = nbytes or self._leaving.get(group, 0)  # a group that is still leaving would have to stay
        ahead_bytes = self._ahead_bytes + held_bytes
        if is_in_forward and held_bytes and self._ahead_bytes and ahead_bytes > SHARE_IN_FORWARD * self._limit:
            return False
        return nbytes == 0 or self._resident_bytes + nbytes <= self._limit

    def note_issued(self, group: GroupKey, nbytes: int) -> None:
        """See `Room`."""
        self._ahead[group] = nbytes or self._leaving.pop(group, 0)
        self._ahead_bytes += self._ahead[group]
        self._resident_bytes += nbytes

    def note_reached(self, group: GroupKey) -> None:
        """See `Room`."""
        self._leaving.pop(group, None)
        self._ahead_bytes -= self._ahead.pop(group, 0)

    def _bring_back(self, groups: Sequence[GroupKey]) -> None:
        for group in groups:
            if group not in self._ahead:  # copied in at the last moment
                self._resident_bytes += self._step.size(group)

    def _begun_behind(self, position: int) -> int:
        """Return the bytes of the group that starts after the line at `position`."""
        following = self._lines[position + 1].boundary if position + 1 < len(self._lines) else None
        return self._step.size(following.group) if following and following.kind is COMMIT else 0

    def _make_room(self) -> list[GroupKey]:
        """Choose groups to release, so that the largest group would fit."""
        released: list[GroupKey] = []
        while self._leaving and self._resident_bytes + self._step.largest_bytes > self._limit:
            group = next(iter(self._leaving))
            self._resident_bytes -= self._leaving.pop(group)
            self.released.add(group)
            released.append(group)
        return released
