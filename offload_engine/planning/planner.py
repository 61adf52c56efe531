"""Makes the plan of a step: a chain of functions from lines to lines, each with its reason.

A line is a boundary with its moves. Every pass takes all lines of the step, those without moves too, and returns new
ones. `everything_leaves` states that each group is copied out when it commits and comes back when its backward begins;
the others take moves out, shift them to other boundaries, or add releases.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from offload_engine.planning.budget import fit_resident_bytes
from offload_engine.planning.choices import Choices
from offload_engine.planning.chosen import keep_chosen
from offload_engine.planning.copy_ins import CopyInOrder, HorizonRoom, Step
from offload_engine.planning.moves import (
    BACKWARD,
    CHUNK_BACKWARD,
    COMMIT,
    DROP,
    FORWARD,
    FORWARD_END,
    HEAD,
    IN,
    ITERATION_END,
    LAUNCH,
    OUT,
    TAIL,
    Boundary,
    GroupKey,
    PlannedMove,
)
from offload_engine.planning.plan import Line, Plan, make_plan
from offload_engine.planning.shapes import Bounds, Shapes, largest_bytes, step_boundaries
from offload_engine.schedule import Action, backward_at_once

_FLUSHES: Final = (FORWARD, TAIL, LAUNCH, FORWARD_END, BACKWARD, ITERATION_END)


def plan_step(
    actions: Sequence[Action],
    shapes: Shapes,
    bounds: Bounds | None = None,
    *,
    choices: Choices | None = None,
    is_combined: bool = False,
    skip: Collection[str] = (),
) -> Plan:
    """Plan one step of one rank.

    Args:
        actions: of the rank, in order.
        shapes: of its chunks, by virtual stage.
        bounds: None: the defaults.
        choices: what becomes of each group; None: all are offloaded.
        is_combined: forward and backward of two chunks run together, as in the all-to-all overlap.
        skip: names of `PASSES` to leave out.

    Raises:
        ValueError: for a name in `skip` that is none of them, and for an action without a shape.
    """
    names = [each.__name__ for each in PASSES]
    if unknown := [name for name in skip if name not in names]:
        raise ValueError(f"skip names {unknown[0]!r}; the passes are {', '.join(names)}")
    at_once = backward_at_once(actions, is_combined)
    largest, chosen = largest_bytes(shapes), choices or Choices()
    step = Step(tuple(actions), shapes, bounds or Bounds(), is_combined, at_once, largest, chosen)
    lines = [Line(boundary, ()) for boundary in step_boundaries(actions, shapes)]
    for each in PASSES:
        if each.__name__ not in skip:
            lines = each(lines, step)
    return make_plan(lines)


class Planner:
    """Plans made before, by all that they were made of: equal inputs give the same plan, and no step spoils another's.

    Args:
        max_plans: how many are remembered; the one not asked for longest is forgotten.
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
        """Return the plan of a step, as `plan_step` makes it."""
        key = (tuple(actions), shapes, bounds, choices, is_combined)
        plan = self._plans.pop(key, None)
        if plan is None:
            plan = plan_step(actions, shapes, bounds, choices=choices, is_combined=is_combined)
        self._plans[key] = plan
        if len(self._plans) > self._max_plans:
            self._plans.popitem(last=False)
        return plan


def everything_leaves(lines: Sequence[Line], step: Step) -> list[Line]:
    """State that each group is copied out when it commits, and copied in when its backward begins.

    The copy-out at the commit runs beside the rest of the forward, so the link is in use from the first group on. With
    nothing else, no copy-in runs beside anything: the plan of horizon 0.
    """
    ops = {COMMIT: OUT, BACKWARD: IN}
    result = []
    for boundary, _ in lines:
        is_moved = boundary.kind in ops and step.size(boundary.group)
        result.append(Line(boundary, (PlannedMove(ops[boundary.kind], boundary.group),) if is_moved else ()))
    return result


def keep_turn_around(lines: Sequence[Line], step: Step) -> list[Line]:
    """Keep the groups that a backward which comes at once needs first: see `ChunkShape.kept_at_once`.

    To copy them would only make that backward wait: their copies could not be out and back before. The last of each
    name, not the last layer: the order in which a layer runs its modules is not always that of their names.
    """
    kept = _kept(step)
    return [Line(boundary, tuple(move for move in moves if move.group not in kept)) for boundary, moves in lines]


def delay_before_experts(lines: Sequence[Line], step: Step) -> list[Line]:
    """Delay the copy-out of groups in front of a layer's experts until those are launched.

    While something is copied, the host takes two to four times as long for what it has not cached, and behind the
    dispatcher's wait for split sizes the device waits for the host to launch the experts' first kernels: two rounds of
    c-moe with `core_attn` took 1.0084 and 1.0037 times no offload, and 1.0019 and 1.0059 with the delay. At most half
    of what may be in flight is delayed, so that compute never waits for a copy because that was issued late. A delayed
    group goes in front of the next that is copied at once, at the latest where the tail begins, or the forward ends.
    Not under a budget of resident bytes, whose room it would take. (Where the link is behind, a reactive policy does
    not delay; a plan does not know.)
    """
    if step.bounds.resident_bytes is not None:
        return list(lines)
    half = step.inflight_limit() / 2
    delayed: list[PlannedMove] = []
    result = []
    for line in lines:
        if _may_delay(line, step) and _bytes_of(delayed, step) + _bytes_of(line.moves, step) <= half:
            delayed += line.moves
            result.append(Line(line.boundary, ()))
        elif delayed and (line.boundary.kind in _FLUSHES or line.moves):
            result.append(Line(line.boundary, (*delayed, *line.moves)))
            delayed = []
        else:
            result.append(line)
    return result


def drop_before_peaks(lines: Sequence[Line], step: Step) -> list[Line]:
    """Release, with a wait if it must be, what has been copied out where memory has its peak.

    - Behind another forward (1F1B, interleaved) the peak is where a chunk's backward begins: all is saved, and the
      backward of an MLP needs the most room. What left before the tail of that forward is released there: the wait
      costs little, for the tail took about as long as the copies. It comes with the backward, not with the end of the
      forward, so that it does not delay the next stage. What the tail copied out has just been issued, and stays: to
      wait for half of it as well was one reason why steps took 1.596 instead of 1.384 times no offload. Not where
      `Bounds.max_inflight_bytes` is set, which means what it says.
    - Where the backward comes at once the peak is in the loss. With a head: everything is released when the logits are
      made; and at the first kept group what is a layer older than it, else the last layer would take memory from
      elsewhere, and that stays reserved. Without a head: everything, at each kept group.

    What is beyond the limit in flight has been released before, by the executor, and is not named. Under a budget
    releases follow from that alone, see `fit_budget`.
    """
    if step.bounds.resident_bytes is not None:
        return list(lines)
    releases = _Releases(step)
    return [_add(line, [PlannedMove(DROP, group) for group in releases.at(line)]) for line in lines]


def place_copy_ins(lines: Sequence[Line], step: Step) -> list[Line]:
    """Issue copy-ins ahead of the backward, within a horizon of bytes, by default twice the largest group.

    So that the backward does not wait, and no further ahead than that, because what has come back is at the peak again.
    Only for chunks whose backward comes before the next forward. Of a chunk whose backward has not begun only the last
    layer comes back: what the loss has just freed is for the weight gradients of the tail, which would find it in
    pieces. Groups of the layers before follow when the backward is at the last of their name, and have the backward of
    a whole layer to come. Where `Bounds.horizon_bytes` is set it alone decides, and the last layer has no precedence.
    """
    if step.bounds.resident_bytes is not None:
        return list(lines)
    away = {move.group for line in lines for move in line.moves if move.op is OUT}
    order = CopyInOrder(step, away, HorizonRoom(_horizon(step)), step.bounds.horizon_bytes is None)
    result = []
    for boundary, moves in lines:
        staying = tuple(move for move in moves if move.op is not IN)
        result.append(_add(Line(boundary, staying), [PlannedMove(IN, group) for group in order.at(boundary)]))
    return result


def fit_budget(lines: Sequence[Line], step: Step) -> list[Line]:
    """Have no more leave, and no later come back, than a budget of resident bytes asks for: see `fit_resident_bytes`.

    Nothing changes without a budget, or without bytes.
    """
    if step.bounds.resident_bytes is None or not step.largest_bytes:
        return list(lines)
    return fit_resident_bytes(lines, step, step.bounds.resident_bytes)


PASSES: Final[tuple[Callable[[Sequence[Line], Step], list[Line]], ...]] = (
    everything_leaves,
    keep_turn_around,
    keep_chosen,
    delay_before_experts,
    place_copy_ins,
    drop_before_peaks,  # what is back by then is not released
    fit_budget,
)
"""In order. Each may be left out by its name."""


class _Releases:
    """What has been copied out and perhaps not been released, oldest first, between two lines of a step."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._kept = _kept(step)
        self._queue: deque[GroupKey] = deque()
        self._queue_bytes = 0
        self._before_tail: list[GroupKey] = []
        self._gone: set[GroupKey] = set()  # released here, or back

    def at(self, line: Line) -> list[GroupKey]:
        """Return what is released at `line`, oldest first, and take in what leaves and comes back there."""
        for op, group in line.moves:
            if op is OUT:
                self._queue.append(group)
                self._queue_bytes += self._step.size(group)
            elif op is IN:
                self._gone.add(group)
        released = [group for group in self._released(line.boundary) if group not in self._gone]
        self._gone.update(released)
        self._trim()
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
        """Count the oldest, up to the last of the name of `kept` that is a layer older or of another chunk."""
        shape, number = self._step.group(kept), 0
        for position, group in enumerate(self._queue, 1):
            other = self._step.group(group)
            if other.name == shape.name and (group.chunk != kept.chunk or other.layer < shape.layer):
                number = position
        return number

    def _trim(self) -> None:
        """Forget what the limit in flight has released."""
        limit = self._step.inflight_limit()
        while self._step.largest_bytes and self._queue_bytes > limit:
            self._queue_bytes -= self._step.size(self._queue.popleft())


def _add(line: Line, moves: Iterable[PlannedMove]) -> Line:
    return Line(line.boundary, (*line.moves, *moves))


def _kept(step: Step) -> frozenset[GroupKey]:
    return frozenset(GroupKey(chunk, i) for chunk in step.at_once for i in step.shape(chunk).kept_at_once())


def _horizon(step: Step) -> int:
    """Return the horizon, in the unit of `Step.size`."""
    limit = step.bounds.horizon_bytes
    return 2 * (step.largest_bytes or 1) if limit is None or (limit and not step.largest_bytes) else limit


def _may_delay(line: Line, step: Step) -> bool:
    return bool(line.moves) and line.boundary.kind is COMMIT and step.group(line.moves[0].group).may_delay


def _bytes_of(moves: Iterable[PlannedMove], step: Step) -> int:
    return sum(step.size(move.group) for move in moves)
