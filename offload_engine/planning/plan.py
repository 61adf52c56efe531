# SPDX-License-Identifier: Apache-2.0
"""Defines a plan: at which boundary of a step which groups are copied out, released and copied in.

As text, one line for each boundary that has moves:

    F0.3:2     OUT 0.3:2
    F0.3:5     OUT 0.3:4 0.3:5          # 4 was delayed until the launch of the experts
    F0.3:head  DROP 0.3:0 0.3:1 0.3:2
    B0.2       IN 0.2:7

A group without a move is kept. The executor of the plan decides the rest: a completed copy-out may be released at any
boundary, compute waits for the oldest copy-outs beyond the limit in flight, and unpack copies in what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import NamedTuple

from offload_engine.planning.moves import (
    BACKWARD,
    COMMIT,
    DROP,
    IN,
    OUT,
    Boundary,
    GroupKey,
    Op,
    PlannedMove,
    parse_boundary,
    parse_group,
)
from offload_engine.planning.shapes import Shapes, check_step, group_keys, step_boundaries
from offload_engine.schedule import Action, ChunkKey

_OPS = {op.value: op for op in Op}


class Line(NamedTuple):
    """The moves of one boundary, in order."""

    boundary: Boundary
    moves: tuple[PlannedMove, ...]

    def __str__(self) -> str:
        words = [" ".join([op.value, *(str(m.group) for m in ms)]) for op, ms in groupby(self.moves, lambda m: m.op)]
        return f"{self.boundary!s:<10} {' '.join(words)}"


@dataclass(frozen=True)
class Plan:
    """Holds the moves of one rank's step, by boundary.

    Raises:
        ValueError: if a boundary comes twice, or has no moves.
    """

    lines: tuple[Line, ...]
    """In the order of the step."""
    _by_boundary: Mapping[Boundary, tuple[PlannedMove, ...]] = field(init=False, repr=False, compare=False)
    _leaving: frozenset[GroupKey] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_boundary = dict(self.lines)
        if len(by_boundary) < len(self.lines) or not all(by_boundary.values()):
            raise ValueError("a plan names each boundary once, and only those that have moves")
        object.__setattr__(self, "_by_boundary", by_boundary)
        leaving = frozenset(move.group for line in self.lines for move in line.moves if move.op is OUT)
        object.__setattr__(self, "_leaving", leaving)

    def at(self, boundary: Boundary) -> tuple[PlannedMove, ...]:
        """Return the moves of `boundary`, in order."""
        return self._by_boundary.get(boundary, ())

    def leaves(self, chunk: ChunkKey, index: int) -> bool:
        """Return whether a group is copied out at any boundary."""
        return GroupKey(chunk, index) in self._leaving

    def moves(self) -> Iterator[tuple[Boundary, PlannedMove]]:
        """Iterate over all moves, with their boundaries, in order."""
        return ((line.boundary, move) for line in self.lines for move in line.moves)


def make_plan(lines: Iterable[Line]) -> Plan:
    """Make a plan of the lines that have moves."""
    return Plan(tuple(line for line in lines if line.moves))


def format_plan(plan: Plan) -> str:
    """Format a plan as text, a line for each boundary."""
    return "".join(f"{line}\n" for line in plan.lines)


def parse_plan(text: str) -> Plan:
    """Parse the text of a plan; the exact inverse of `format_plan`. Empty lines and `# comments` are ignored.

    Raises:
        ValueError: if a line is not of a plan; names the first one.
    """
    lines: dict[Boundary, Line] = {}
    for number, row in enumerate(text.splitlines(), 1):
        words = row.partition("#")[0].split()
        if not words:
            continue
        try:
            line = _parse_line(words)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        if line.boundary in lines:
            raise ValueError(f"line {number}: {line.boundary} has a line already")
        lines[line.boundary] = line
    return Plan(tuple(lines.values()))


def validate_plan(plan: Plan, actions: Sequence[Action], shapes: Shapes) -> None:
    """Check that a step can run as planned, and that everything that leaves comes back in time.

    Raises:
        ValueError: naming line and move: a boundary or group that the step does not have, or out of order; an OUT
            before its commit, or after an OUT that has not come back; a DROP of a group that has not left, or twice; an
            IN of a group that has not left, or after its own backward; an OUT without an IN. Also as `check_step`.
    """
    check_step(actions)
    order = {boundary: position for position, boundary in enumerate(step_boundaries(actions, shapes))}
    checker = _Checker(order, frozenset(group_keys(actions, shapes)))
    for number, line in enumerate(plan.lines, 1):
        try:
            checker.check_line(line)
        except ValueError as error:
            raise ValueError(f"line {number} ({line.boundary}): {error}") from None
    for group, (where, _) in checker.away.items():
        raise ValueError(f"line {_line_number(plan, where)} ({where}): OUT {group}: nothing brings it back")


def diff_plans(a: Plan, b: Plan) -> str:
    """List the moves that two plans make at different boundaries, one per line; empty if the plans are equal.

    As text `OUT 0.3:4  F0.3:4 -> F0.3:5`; `none` where a plan does not make the move.
    """
    at_a, at_b = _occurrences(a), _occurrences(b)
    rows = []
    for move in dict.fromkeys([*at_a, *at_b]):
        here, there = at_a.get(move, ()), at_b.get(move, ())
        if here != there:
            rows.append(f"{move!s:<12} {_places(here)} -> {_places(there)}")
    if not rows and a != b:
        rows = [f"{x.boundary}: order of moves: {x} -> {y}" for x, y in zip(a.lines, b.lines, strict=True) if x != y]
    return "".join(f"{row}\n" for row in rows)


class _Checker:
    """Tracks the state of each group between two lines of a plan."""

    def __init__(self, order: Mapping[Boundary, int], groups: frozenset[GroupKey]) -> None:
        self.away: dict[GroupKey, tuple[Boundary, bool]] = {}  # where it left, and whether it was released
        self._order = order
        self._groups = groups
        self._position = -1

    def check_line(self, line: Line) -> None:
        """Check the moves of the next line. Raises ValueError, which names the first wrong move."""
        position = self._order.get(line.boundary)
        if position is None:
            raise ValueError(f"{line.moves[0]}: the step has no such boundary")
        if position < self._position:
            raise ValueError(f"{line.moves[0]}: the boundary comes before that of the line above")
        self._position = position
        for op, group in line.moves:
            problem = "the step has no such group" if group not in self._groups else self._find_problem(op, group)
            if problem:
                raise ValueError(f"{op.value} {group}: {problem}")
            self._apply(op, group, line.boundary)

    def _find_problem(self, op: Op, group: GroupKey) -> str:
        if op is OUT:
            return self._problem_of_out(group)
        if group not in self.away:
            return "it has not left"
        if op is DROP:
            return "it has been released before" if self.away[group][1] else ""
        is_late = self._position > self._order[Boundary(BACKWARD, *group)]
        return "its backward has begun before" if is_late else ""

    def _problem_of_out(self, group: GroupKey) -> str:
        if group in self.away:
            return "it has left before and not come back"
        if self._position < self._order[Boundary(COMMIT, *group)]:
            return "it has not committed"
        backward = self._order.get(Boundary(BACKWARD, *group))
        if backward is None:
            return "the step has no backward of its chunk"
        return "its backward has begun before" if self._position >= backward else ""

    def _apply(self, op: Op, group: GroupKey, boundary: Boundary) -> None:
        if op is IN:
            del self.away[group]
        else:
            self.away[group] = (boundary, False) if op is OUT else (self.away[group][0], True)


def _parse_line(words: Sequence[str]) -> Line:
    boundary = parse_boundary(words[0])
    op, moves = None, []
    for word, following in pairwise([*words[1:], ""]):
        if word in _OPS:
            op = _OPS[word]
            if not following or following in _OPS:
                raise ValueError(f"{word} without a group")
        elif op is None:
            raise ValueError(f"expected one of {', '.join(_OPS)} after {boundary}, got {word!r}")
        else:
            moves.append(PlannedMove(op, parse_group(word)))
    if not moves:
        raise ValueError(f"{boundary} without a move")
    return Line(boundary, tuple(moves))


def _occurrences(plan: Plan) -> dict[PlannedMove, tuple[Boundary, ...]]:
    found: dict[PlannedMove, tuple[Boundary, ...]] = {}
    for boundary, move in plan.moves():
        found[move] = (*found.get(move, ()), boundary)
    return found


def _places(boundaries: Sequence[Boundary]) -> str:
    return ", ".join(map(str, boundaries)) or "none"


def _line_number(plan: Plan, boundary: Boundary) -> int:
    return next(number for number, line in enumerate(plan.lines, 1) if line.boundary == boundary)
