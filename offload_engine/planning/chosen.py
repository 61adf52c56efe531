# SPDX-License-Identifier: Apache-2.0
"""Applies choices to a plan: groups that are kept do not move."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from offload_engine.planning.choices import Choice, slots_of
from offload_engine.planning.copy_ins import Step
from offload_engine.planning.plan import Line


def keep_chosen(lines: Sequence[Line], step: Step) -> list[Line]:
    """Remove the moves of groups that are chosen to be kept, in every microbatch.

    A recomputed group has no bytes, or those of its input, which leave like others. This pass comes before copy-ins and
    releases are placed, so that they apply only to groups that move.
    """
    staying = {
        (stage, index)
        for stage, shape in enumerate(step.shapes if step.choices else ())
        for index, slot in enumerate(slots_of(stage, shape.groups))
        if step.choices.of(slot) is Choice.KEEP
    }
    if not staying:
        return list(lines)
    return [line if not line.moves else _without(line, staying) for line in lines]


def _without(line: Line, staying: Collection[tuple[int, int]]) -> Line:
    left = [move for move in line.moves if (move.group.chunk.stage, move.group.index) not in staying]
    return line if len(left) == len(line.moves) else Line(line.boundary, tuple(left))
