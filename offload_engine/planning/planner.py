# SPDX-License-Identifier: Apache-2.0
"""Makes the plan of a step: a chain of functions from lines to lines, each with its reason.

A line is a boundary with its moves. Every pass takes all lines of the step, also those without moves, and returns new
ones. `everything_leaves` copies each group out when it commits and in when its backward begins; the other passes remove
moves, shift them to other boundaries, or add releases.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from offload_engine.planning.budget import fit_resident_bytes
from offload_engine.planning.choices import Choices
from offload_engine.planning.chosen import keep_chosen
from offload_engine.planning.copy_ins import CopyInOrder, HorizonRoom, Step
from offload_engine.planning.moves import (
    BACKWARD,
    COMMIT,
    DROP,
    FORWARD,
    FORWARD_END,
    HELD,
    IN,
    ITERATION_END,
    LAUNCH,
    OUT,
    TAIL,
    UNKEEP,
    Boundary,
    GroupKey,
    PlannedMove,
)
from offload_engine.planning.plan import Line, Plan, make_plan
from offload_engine.planning.releases import Releases
from offload_engine.planning.shapes import Bounds, Shapes, check_step, largest_bytes, step_boundaries
from offload_engine.schedule import Action, backward_at_once

_FLUSHES: Final = (FORWARD, TAIL, LAUNCH, HELD, FORWARD_END, BACKWARD, ITERATION_END)


def plan_step(
    actions: Sequence[Action],
    shapes: Shapes,
    bounds: Bounds | None = None,
    *,
    choices: Choices | None = None,
    is_combined: bool = False,
    skip: Collection[str] = (),
    boundaries: Sequence[Boundary] | None = None,
) -> Plan:
    """Plan one step of one rank.

    Args:
        actions: schedule of the rank, in order.
        shapes: shapes of its chunks, by virtual stage.
        bounds: bounds of the plan; None: the defaults.
        choices: the choice for each group; None: all are offloaded.
        is_combined: forward and backward of two chunks run together, as in the all-to-all overlap.
        skip: names of `PASSES` to skip.
        boundaries: boundaries of the step, if known, as `step_boundaries` lists them.

    Raises:
        ValueError: for an unknown name in `skip`, for an action without a shape, and as `check_step`.
    """
    if boundaries is None:
        check_step(actions)
    names = [each.__name__ for each in PASSES]
    if unknown := [name for name in skip if name not in names]:
        raise ValueError(f"skip names {unknown[0]!r}; the passes are {', '.join(names)}")
    at_once = backward_at_once(actions, is_combined)
    largest, chosen = largest_bytes(shapes), choices or Choices()
    step = Step(tuple(actions), shapes, bounds or Bounds(), is_combined, at_once, largest, chosen)
    lines = [Line(boundary, ()) for boundary in boundaries or step_boundaries(actions, shapes)]
    for each in PASSES:
        if each.__name__ not in skip:
            lines = each(lines, step)
    return make_plan(lines)


class Planner:
    """Memoises plans by all of their inputs, so steps of different kinds do not evict each other's plan.

    Args:
        max_plans: number of plans to keep; the least recently used one is forgotten.
    """

    def __init__(self, max_plans: int = 16) -> None:
        if max_plans < 1:
            raise ValueError(f"max_plans must be at least 1, got {max_plans}")
        self._max_plans = max_plans
        self._plans: OrderedDict[tuple[object, ...], Plan] = OrderedDict()

    def plan_step(
        self,
        actions: Sequence[Action],
        shapes: Shapes,
        bounds: Bounds | None = None,
        *,
        choices: Choices | None = None,
        is_combined: bool = False,
    ) -> Plan:
        """Return the plan of a step; see the function `plan_step`."""
        key = (tuple(actions), shapes, bounds, choices, is_combined)
        plan = self._plans.pop(key, None)
        if plan is None:
            plan = plan_step(actions, shapes, bounds, choices=choices, is_combined=is_combined)
        self._plans[key] = plan
        if len(self._plans) > self._max_plans:
            self._plans.popitem(last=False)
        return plan


def everything_leaves(lines: Sequence[Line], step: Step) -> list[Line]:
    """Copy each group out when it commits, and in when its backward begins.

    A copy-out at the commit overlaps the rest of the forward, so the link is in use from the first group on. Without
    the other passes no copy-in overlaps anything: this is the plan of horizon 0.
    """
    result = []
    for line in lines:
        kind = line.boundary.kind
        if (kind is COMMIT or kind is BACKWARD) and step.size(group := line.boundary.group):
            line = Line(line.boundary, (PlannedMove(OUT if kind is COMMIT else IN, group),))
        result.append(line)
    return result


def keep_turn_around(lines: Sequence[Line], step: Step) -> list[Line]:
    """Keep the groups that a backward at once needs first: see `ChunkShape.kept_at_once`.

    They could not be copied out and in in time, so that backward would wait. The last group of each name is kept, not
    the last layer: a layer does not always run its modules in the order of their names.
    """
    kept = _kept(step)
    return (
        [
            Line(line.boundary, tuple(move for move in line.moves if move.group not in kept))
            if any(move.group in kept for move in line.moves)
            else line
            for line in lines
        ]
        if kept
        else list(lines)
    )


def leave_when_unkept(lines: Sequence[Line], step: Step) -> list[Line]:
    """Copy a group out late if it was kept for a backward that does not come at once after all.

    This happens if a module runs twice in a chunk: its first run cannot know that only the backward of its last run
    comes next.
    """
    if all(group.unkeep_count is None for shape in step.shapes for group in shape.groups):
        return list(lines)
    result = []
    for boundary, moves in lines:
        staying = tuple(m for m in moves if m.op is not OUT or _unkeep_count(step, m.group) is None)
        is_unkept = boundary.kind is UNKEEP and step.size(boundary.group) and boundary.group.chunk in step.at_once
        result.append(Line(boundary, (*staying, PlannedMove(OUT, boundary.group)) if is_unkept else staying))
    return result


def delay_before_experts(lines: Sequence[Line], step: Step) -> list[Line]:
    """Delay the copy-out of groups before a layer's experts until these are launched.

    During a copy, reads of uncached memory take the host two to four times as long, and after the dispatcher's wait for
    split sizes the device waits for the host to launch the experts' first kernels: two rounds of c-moe with `core_attn`
    took 1.0084 and 1.0037 times no offload, and 1.0019 and 1.0059 with the delay. At most half of the bytes that may be
    in flight are delayed, so that compute never waits for a copy because it was issued late. A delayed group is copied
    out before the next group that is not delayed; at the latest where outside references are declared as no longer read
    (their storage frees no memory before it leaves), where the tail begins, or where the forward ends.
    Under a budget of resident bytes nothing is delayed, because delayed bytes would take its room. (A reactive policy
    also stops delaying once the link has fallen behind, which a plan cannot know.)
    """
    if step.bounds.resident_bytes is not None or not any(g.may_delay for shape in step.shapes for g in shape.groups):
        return list(lines)
    half = step.inflight_limit() / 2
    delayed: list[PlannedMove] = []
    result = []
    for line in lines:
        if _may_delay(line, step) and _bytes_of(delayed, step) + _bytes_of(line.moves, step) <= half:
            delayed += line.moves
            line = Line(line.boundary, ())
        elif delayed and (line.boundary.kind in _FLUSHES or (line.moves and line.boundary.kind is not UNKEEP)):
            line = Line(line.boundary, (*delayed, *line.moves))
            delayed = []
        result.append(line)
    return result


def drop_before_peaks(lines: Sequence[Line], step: Step) -> list[Line]:
    """Release copied-out groups where memory peaks, with a wait if their copies are not complete.

    - After another forward (1F1B, interleaved) the peak is where a chunk's backward begins: everything is saved, and
      the backward of an MLP needs the most room. Groups that left before the tail of that forward are released there.
      This wait costs little, because the tail took about as long as the copies. It comes with the backward, not with
      the end of the forward, so that it does not delay the next stage. The copy-outs of the tail have just been issued
      and are not released: waiting for half of them as well was one reason why steps took 1.596 instead of 1.384 times
      no offload. With `Bounds.max_inflight_bytes` nothing is released here: that bound alone decides.
    - If the backward comes at once, the peak is in the loss. With a head, everything is released when the logits are
      made, and groups a layer older than the first kept group at that group: otherwise the last layer would take other
      memory, which stays reserved. Without a head, everything is released at each kept group.

    The executor releases groups beyond the limit in flight earlier, so the plan does not name them. Under a budget,
    releases follow from the budget alone; see `fit_budget`.
    """
    if step.bounds.resident_bytes is not None:
        return list(lines)
    releases = Releases(step, _kept(step))
    return [
        _add(line, [PlannedMove(DROP, group) for group in released]) if (released := releases.at(line)) else line
        for line in lines
    ]


def place_copy_ins(lines: Sequence[Line], step: Step) -> list[Line]:
    """Issue copy-ins ahead of the backward, within a horizon of bytes, by default twice the largest group.

    The horizon keeps the backward from waiting; a longer one would raise the peak. Only chunks whose backward comes
    before the next forward return. Of a chunk whose backward has not begun, only the last layer returns: the weight
    gradients of the tail need the memory that the loss has just freed in large pieces. Groups of earlier layers return
    when the backward reaches the next group of their name, so their copies have the backward of a whole layer; if a
    layer has a single group, the first returns when the backward of the tail is over (see `awaits_tail`). With
    `Bounds.horizon_bytes` that bound alone decides, and the last layer has no precedence.
    """
    if step.bounds.resident_bytes is not None:
        return list(lines)
    away = {move.group for line in lines for move in line.moves}
    order = CopyInOrder(step, away, HorizonRoom(_horizon(step)), step.bounds.horizon_bytes is None)
    result = []
    for line in lines:
        coming = order.at(line.boundary)
        if coming or any(move.op is IN for move in line.moves):
            staying = [move for move in line.moves if move.op is not IN]
            line = Line(line.boundary, (*staying, *(PlannedMove(IN, group) for group in coming)))
        result.append(line)
    return result


def fit_budget(lines: Sequence[Line], step: Step) -> list[Line]:
    """Keep all groups that fit into a budget of resident bytes, and bring the others back early.

    See `fit_resident_bytes`. Nothing changes without a budget, or if bytes are not known.
    """
    if step.bounds.resident_bytes is None or not step.largest_bytes:
        return list(lines)
    return fit_resident_bytes(lines, step, step.bounds.resident_bytes)


PASSES: Final[tuple[Callable[[Sequence[Line], Step], list[Line]], ...]] = (
    everything_leaves,
    keep_turn_around,
    leave_when_unkept,
    keep_chosen,
    delay_before_experts,
    place_copy_ins,
    drop_before_peaks,  # groups that are back by then are not released
    fit_budget,
)
"""In order. Each may be left out by its name."""


def _add(line: Line, moves: Iterable[PlannedMove]) -> Line:
    return Line(line.boundary, (*line.moves, *moves))


def _kept(step: Step) -> frozenset[GroupKey]:
    return frozenset(GroupKey(chunk, i) for chunk in step.at_once for i in step.shape(chunk).kept_at_once())


def _unkeep_count(step: Step, group: GroupKey) -> int | None:
    return step.group(group).unkeep_count if group.chunk in step.at_once else None


def _horizon(step: Step) -> int:
    """Return the horizon, in the unit of `Step.size`."""
    limit = step.bounds.horizon_bytes
    return 2 * (step.largest_bytes or 1) if limit is None or (limit and not step.largest_bytes) else limit


def _may_delay(line: Line, step: Step) -> bool:
    return bool(line.moves) and line.boundary.kind is COMMIT and step.group(line.moves[0].group).may_delay


def _bytes_of(moves: Iterable[PlannedMove], step: Step) -> int:
    return sum(step.size(move.group) for move in moves)
