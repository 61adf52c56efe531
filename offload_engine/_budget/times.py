# SPDX-License-Identifier: Apache-2.0
"""Computes the times of groups from the times between the boundaries of a measured step."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final, NamedTuple

from offload_engine._budget.measure import Interval
from offload_engine._observe.record import WaitRecord
from offload_engine.planning.choices import Slot, slots_of
from offload_engine.planning.moves import (
    BACKWARD,
    BACKWARD_END,
    CHUNK_BACKWARD,
    COMMIT,
    FORWARD,
    FORWARD_END,
    HEAD,
    HELD,
    ITERATION_END,
    LAUNCH,
    LOSS_DONE,
    TAIL,
    Boundary,
    BoundaryKind,
)
from offload_engine.planning.shapes import ChunkShape, Shapes
from offload_engine.schedule import Action, ChunkKey

_IN_FORWARD: Final = (FORWARD, COMMIT, LAUNCH, HELD, TAIL, HEAD)

_LATE_MS: Final = 0.2
"""A device that is as close to its host as that waits for it. More than clocks drift apart in a step."""
_LATE_SHARE: Final = 1 / 2
"""Nor does a device have enough to do that is behind its host by less than this share of the interval."""

_NUMBER: Final = re.compile(r"\d+")

Part = tuple[int, int, str]
"""Virtual stage, index of the group or -1, and name of the field that has the time."""


class TimedPart(NamedTuple):
    """One part of the forward or backward of one chunk."""

    part: Part
    action: Action
    whole_ms: float
    waited_ms: float
    """Of the whole, waits for copies."""
    engine_ms: float
    """Host time of the engine meanwhile."""
    is_late: bool
    """The device may have waited for the host."""

    @property
    def milliseconds(self) -> float:
        """Return its time without waits for copies."""
        return max(0.0, self.whole_ms - self.waited_ms)

    def plus(self, other: TimedPart) -> TimedPart:
        """Return this part with more of it."""
        times = self.whole_ms + other.whole_ms, self.waited_ms + other.waited_ms, self.engine_ms + other.engine_ms
        return TimedPart(self.part, self.action, *times, self.is_late or other.is_late)


def timed_parts(shapes: Shapes, intervals: Iterable[Interval], waits: Iterable[WaitRecord]) -> list[TimedPart]:
    """Return the parts of a measured step, in order, each once in an action.

    Time in forward before a group opens counts as the group's. A backward that comes back to a group is still that of
    the group it has come to: all groups up to that one are in use. (What attention returns is saved with the projection
    behind it, and read once more in the backward of attention: 64 of 117 ms of a layer.) Times between chunks, such as
    pipeline bubbles, do not count.

    Args:
        shapes: of the chunks.
        intervals: between boundaries, in order.
        waits: of compute for copies.
    """
    waited = sorted((wait.begin_ms, wait.end_ms) for wait in waits)
    found: dict[tuple[Part, Action], TimedPart] = {}
    reached: dict[Action, int] = {}
    whole_ms = waited_ms = engine_ms = 0.0
    is_late, before, position = False, Boundary(ITERATION_END), 0
    for interval in intervals:
        own_ms = interval.end_ms - interval.begin_ms
        whole_ms, engine_ms = whole_ms + own_ms, engine_ms + interval.engine_ms
        while position < len(waited) and waited[position][0] < interval.end_ms:
            own_ms -= waited[position][1] - waited[position][0]
            waited_ms += waited[position][1] - waited[position][0]
            position += 1
        is_late |= interval.lag_ms < max(_LATE_MS, _LATE_SHARE * own_ms)
        kind = interval.ends_at.kind
        if kind in (LAUNCH, HELD, TAIL) or (kind is HEAD and before.kind is HEAD):  # the head may begin in two modules
            continue
        part = _part_between(before, interval.ends_at, shapes)
        if part is not None:
            action = _action_of(part, before.chunk or interval.ends_at.chunk)
            stage, index, field = part
            if field == "backward_ms":
                index = reached[action] = min(index, reached.get(action, index))
            own = TimedPart((stage, index, field), action, whole_ms, waited_ms, engine_ms, is_late)
            begun = found.get((own.part, action))
            found[own.part, action] = own if begun is None else begun.plus(own)
        whole_ms = waited_ms = engine_ms = 0.0
        is_late, before = False, interval.ends_at
    return list(found.values())


def with_times(shapes: Shapes, timed: Iterable[TimedPart]) -> Shapes:
    """Return shapes with the times of a measured step: the median over its microbatches.

    Where the device waits for the host, which moves and measures less in any other step, the same part of other layers
    tells more. (Mixture of experts on two H200s: its forward seemed to take a fifth longer, and in another step a
    tenth.)
    """
    own, alike = dict[Part, list[TimedPart]](), dict[tuple[object, ...], list[TimedPart]]()
    slots = [slots_of(stage, shape.groups) for stage, shape in enumerate(shapes)]
    kinds: dict[Part, tuple[object, ...]] = {}
    for each in timed:
        stage, index, field = part = each.part
        slot = slots[stage][index] if index >= 0 else None
        kinds[part] = part if slot is None else _kind_of(slot, shapes[stage].groups[index].nbytes, field)
        own.setdefault(part, []).append(each)
        alike.setdefault(kinds[part], []).append(each)
    times = {part: _time_of(values, alike[kinds[part]]) for part, values in own.items()}
    return tuple(_timed(stage, shape, times) for stage, shape in enumerate(shapes))


def _kind_of(slot: Slot, nbytes: int, field: str) -> tuple[object, ...]:
    """Return what alike parts of other layers share with this one: groups may be named after their layer's number."""
    return _NUMBER.sub("", slot.name), slot.part, nbytes, field


def _time_of(own: Sequence[TimedPart], alike: Sequence[TimedPart]) -> float:
    """Return the time of a part, by those of its microbatches, or of all layers that have it."""
    timely, others = ([each.milliseconds for each in parts if not each.is_late] for parts in (own, alike))
    if 2 * len(timely) >= len(own):
        return median(timely)
    if others:
        return min(median(each.milliseconds for each in own), median(others))
    # The quarter that waited least, and without the engine.
    return max(0.0, sorted(each.milliseconds - each.engine_ms for each in alike)[len(alike) // 4])


def action_times(actions: Iterable[Action], timed: Sequence[TimedPart]) -> tuple[float, ...]:
    """Return how long each action took, in ms, in order. The last part of a backward counts with its median.

    Else it would count until the next action begins, which may wait for another rank.
    """
    last: dict[Action, TimedPart] = {each.action: each for each in timed if each.action.kind == "B"}
    of_last: dict[Part, list[float]] = {}
    for each in last.values():
        of_last.setdefault(each.part, []).append(each.whole_ms)
    found: dict[Action, float] = {}
    for each in timed:
        is_last = last.get(each.action) is each
        milliseconds = min(each.whole_ms, median(of_last[each.part])) if is_last else each.whole_ms
        found[each.action] = found.get(each.action, 0.0) + milliseconds
    return tuple(found.get(action, 0.0) for action in actions)


def _action_of(part: Part, chunk: ChunkKey | None) -> Action:
    assert chunk is not None
    return Action("B" if part[-1].endswith("backward_ms") else "F", chunk)


def _part_between(before: Boundary, boundary: Boundary, shapes: Shapes) -> Part | None:
    """Return what ran between two boundaries; None if it belongs to no chunk."""
    kind, chunk, index = boundary
    if before.kind is BACKWARD and (kind is not BACKWARD_END or before.index != index):
        assert before.chunk is not None
        return before.chunk.stage, before.index, "backward_ms"  # ends of backwards are not reported here
    if chunk is None or before.chunk != chunk or chunk.stage >= len(shapes):
        return None
    field = _field_of_group(before.kind, kind)
    if field is not None:
        return chunk.stage, before.index if kind is BACKWARD else index, field
    field = _field_of_chunk(before.kind, kind, shapes[chunk.stage].has_head)
    return None if field is None else (chunk.stage, -1, field)


def _field_of_group(before: BoundaryKind, kind: BoundaryKind) -> str | None:
    if kind is COMMIT and before in _IN_FORWARD:
        return "forward_ms"
    if kind is BACKWARD_END:
        return "backward_ms"
    return "lead_backward_ms" if kind is BACKWARD and before is BACKWARD_END else None


def _field_of_chunk(before: BoundaryKind, kind: BoundaryKind, has_head: bool) -> str | None:
    if kind is HEAD:
        return "rest_ms"
    if kind is FORWARD_END:
        return "head_ms" if has_head and before is HEAD else "rest_ms"
    if kind is LOSS_DONE:
        return "head_backward_ms"
    if kind is CHUNK_BACKWARD or (kind is BACKWARD and before in _IN_FORWARD):
        return "rest_ms" if before in _IN_FORWARD else None
    return "rest_backward_ms" if kind is BACKWARD else None


def _timed(stage: int, shape: ChunkShape, times: dict[Part, float]) -> ChunkShape:
    def time(field: str, index: int = -1) -> float:
        return times.get((stage, index, field), 0.0)

    groups = tuple(
        dataclasses.replace(
            group,
            forward_ms=time("forward_ms", index),
            backward_ms=time("backward_ms", index),
            lead_backward_ms=time("lead_backward_ms", index),
        )
        for index, group in enumerate(shape.groups)
    )
    return dataclasses.replace(
        shape,
        groups=groups,
        head_ms=time("head_ms"),
        head_backward_ms=time("head_backward_ms"),
        rest_ms=time("rest_ms"),
        rest_backward_ms=time("rest_backward_ms"),
    )
