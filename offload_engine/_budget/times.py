# SPDX-License-Identifier: Apache-2.0
"""Computes the times of groups from the times between the boundaries of a measured step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final

from offload_engine._budget.measure import Interval
from offload_engine._observe.record import WaitRecord
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

_IN_FORWARD: Final = (FORWARD, COMMIT, LAUNCH, HELD, TAIL, HEAD)

Part = tuple[int, int, str]
"""Virtual stage, index of the group or -1, and name of the field that has the time."""


def with_times(shapes: Shapes, intervals: Sequence[Interval], waits: Iterable[WaitRecord]) -> Shapes:
    """Return shapes with the times of a measured step: the median over its microbatches.

    Time in forward before a group opens counts as the group's. Waits for copies, and times between chunks, such as
    pipeline bubbles, do not count.

    Args:
        shapes: of the chunks.
        intervals: between boundaries, in order.
        waits: of compute for copies.
    """
    waited = sorted((wait.begin_ms, wait.end_ms) for wait in waits)
    found: dict[Part, list[float]] = {}
    carried, before = 0.0, Boundary(ITERATION_END)
    position = 0
    for interval in intervals:
        milliseconds = carried + interval.end_ms - interval.begin_ms
        while position < len(waited) and waited[position][0] < interval.end_ms:
            milliseconds -= waited[position][1] - waited[position][0]
            position += 1
        kind = interval.ends_at.kind
        if kind in (LAUNCH, HELD, TAIL) or (kind is HEAD and before.kind is HEAD):  # the head may begin in two modules
            carried = milliseconds
            continue
        part = _part_between(before, interval.ends_at, shapes)
        if part is not None:
            found.setdefault(part, []).append(max(0.0, milliseconds))
        carried, before = 0.0, interval.ends_at
    times = {part: median(values) for part, values in found.items()}
    return tuple(_timed(stage, shape, times) for stage, shape in enumerate(shapes))


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
