# SPDX-License-Identifier: Apache-2.0
"""`ShapeLog`: learns the shapes of chunks from the steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from offload_engine._chunk.progress import ChunkProgress
from offload_engine._saved.storage import TensorGroup
from offload_engine.planning.choices import Slot, slots_of
from offload_engine.planning.moves import HELD, LAUNCH, TAIL, BoundaryKind
from offload_engine.planning.shapes import ChunkShape, GroupShape, Shapes
from offload_engine.schedule import ChunkKey

_UNSEEN_LAYERS = 1 << 30
"""Number of layers of every chunk: large enough that no group is in the last two, so that traits alone say what is
kept."""


class ShapeLog:
    """Learns one shape for each virtual stage. Bytes only grow, so that routing soon causes no more new plans."""

    def __init__(self) -> None:
        self._shapes: dict[int, ChunkShape | None] = {}  # None: its chunks differ in more than bytes
        self._tails: dict[ChunkKey, int] = {}  # of the running step
        self._launches: dict[ChunkKey, list[int]] = {}
        self._held: dict[ChunkKey, list[int]] = {}
        self._unkept: dict[TensorGroup, int] = {}

    def shapes(self, stages: set[int]) -> Shapes | None:
        """Return the shapes of these virtual stages; None if one of them is not known yet, or has none."""
        if stages != set(range(len(stages))):
            return None
        shapes = [self._shapes.get(stage) for stage in sorted(stages)]
        found = tuple(shape for shape in shapes if shape is not None)
        return found if len(found) == len(shapes) else None

    def slots(self) -> frozenset[Slot]:
        """Return the slots of all groups of the chunks that have shown one shape."""
        known = [(stage, shape) for stage, shape in self._shapes.items() if shape is not None]
        return frozenset([slot for stage, shape in known for slot in slots_of(stage, shape.groups)])

    def mark(self, kind: BoundaryKind, chunk: ChunkProgress) -> None:
        """Record after how many groups of a forward a TAIL, LAUNCH or HELD comes; ignore other boundaries."""
        if kind is TAIL:
            self._tails[chunk.key] = len(chunk.groups)
        elif kind is LAUNCH:
            self._launches.setdefault(chunk.key, []).append(len(chunk.groups))
        elif kind is HELD:
            self._held.setdefault(chunk.key, []).append(len(chunk.groups))

    def mark_unkept(self, chunk: ChunkProgress, group: TensorGroup) -> None:
        """Record that a kept group is no longer kept (UNKEEP)."""
        self._unkept[group] = len(chunk.groups)

    def learn(self, chunks: Iterable[ChunkProgress]) -> None:
        """Learn from the chunks of a step that is over."""
        seen: dict[int, list[ChunkShape]] = {}
        for chunk in chunks:
            seen.setdefault(chunk.key.stage, []).append(self._shape_of(chunk))
        for stage, shapes in seen.items():
            known = self._shapes.get(stage)
            self._shapes[stage] = _joined(shapes if known is None else [known, *shapes]) or _joined(shapes)

    def forget(self) -> None:
        """Forget all shapes, because the next step has others."""
        self._shapes.clear()

    def clear(self) -> None:
        """Forget the running step."""
        self._tails.clear()
        self._launches.clear()
        self._held.clear()
        self._unkept.clear()

    def _shape_of(self, chunk: ChunkProgress) -> ChunkShape:
        return ChunkShape(
            groups=tuple(
                GroupShape(
                    group.name,
                    layer=group.layer,
                    nbytes=group.own_bytes,
                    may_delay=group.may_delay,
                    keep=group.is_kept,
                    unkeep_count=self._unkept.get(group),
                )
                for group in chunk.groups
            ),
            num_layers=_UNSEEN_LAYERS,
            tail_index=self._tails.get(chunk.key),
            has_tail_end=chunk.has_tail_end,
            launch_counts=tuple(self._launches.get(chunk.key, ())),
            has_head=chunk.has_head,
            held_counts=tuple(sorted(set(self._held.get(chunk.key, ())))),
        )


def _joined(shapes: list[ChunkShape]) -> ChunkShape | None:
    """Return the shape that covers all of `shapes`; None if they differ in more than bytes."""

    first = shapes[0]
    groups = []
    for same in zip(*(shape.groups for shape in shapes)):  # noqa: B905  (their numbers are compared below)
        if len({(group.name, group.layer, group.may_delay) for group in same}) > 1:
            return None
        groups.append(
            GroupShape(
                same[0].name,
                layer=same[0].layer,
                nbytes=max(group.nbytes for group in same),
                may_delay=same[0].may_delay,
                keep=any(group.keep for group in same),
                unkeep_count=max((g.unkeep_count for g in same if g.unkeep_count is not None), default=None),
            )
        )
    is_same = all(
        len(shape.groups) == len(groups)
        and (shape.tail_index, shape.has_tail_end) == (first.tail_index, first.has_tail_end)
        and shape.launch_counts == first.launch_counts
        for shape in shapes
    )
    if not is_same:
        return None
    has_head = any(shape.has_head for shape in shapes)
    # Moments that only some of the chunks had are left out: a copy-out planned there might never be issued.
    held = set(first.held_counts).intersection(*(shape.held_counts for shape in shapes))
    return replace(first, groups=tuple(groups), has_head=has_head, held_counts=tuple(sorted(held)))
