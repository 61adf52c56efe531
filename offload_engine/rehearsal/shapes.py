# SPDX-License-Identifier: Apache-2.0
"""Makes the shapes of chunks, with bytes and times, from the boundaries of one rehearsed step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from offload_engine.planning.moves import (
    BACKWARD,
    CHUNK_BACKWARD,
    COMMIT,
    FORWARD,
    HEAD,
    LAUNCH,
    LOSS_DONE,
    TAIL,
)
from offload_engine.planning.shapes import ChunkShape, GroupShape, Shapes
from offload_engine.rehearsal.engine import NotedBoundary, NotedGroup
from offload_engine.schedule import ChunkKey


def shapes_of(boundaries: Sequence[NotedBoundary]) -> Shapes:
    """Return the shape of each virtual stage, from its last microbatch.

    The time between two boundaries belongs to the work between them. A group of Megatron's has no mark where its
    backward ends, so its backward lasts until the next one begins.
    """
    walk = _Walk()
    for noted in boundaries:
        walk.come_to(noted)
    last: dict[int, _Chunk] = {}
    for key, chunk in walk.chunks.items():
        if key.stage not in last or key.microbatch >= last[key.stage].microbatch:
            last[key.stage] = chunk
    return tuple(last[stage].shape(walk.has_head(stage)) for stage in sorted(last))


@dataclass
class _Chunk:
    microbatch: int
    groups: list[NotedGroup] = field(default_factory=list)
    forward_ms: dict[int, float] = field(default_factory=dict)
    backward_ms: dict[int, float] = field(default_factory=dict)
    tail_index: int | None = None
    launch_counts: list[int] = field(default_factory=list)
    rest_ms: float = 0.0
    head_ms: float = 0.0
    head_backward_ms: float = 0.0
    rest_backward_ms: float = 0.0
    is_in_head: bool = False
    has_head: bool = False

    def shape(self, has_head: bool) -> ChunkShape:
        """Return the shape; without a head, its time belongs to the rest."""
        groups = tuple(
            GroupShape(
                group.name,
                group.layer,
                group.own_bytes,
                self.forward_ms.get(index, 0.0),
                self.backward_ms.get(index, 0.0),
                may_delay=group.may_delay,
            )
            for index, group in enumerate(self.groups)
        )
        rest, rest_backward = self.rest_ms, self.rest_backward_ms
        head, head_backward = (self.head_ms, self.head_backward_ms) if has_head else (0.0, 0.0)
        if not has_head:
            rest, rest_backward = rest + self.head_ms, rest_backward + self.head_backward_ms
        return ChunkShape(
            groups,
            1 + max((group.layer for group in groups), default=-1),
            self.tail_index,
            tuple(self.launch_counts),
            has_head,
            head,
            head_backward,
            rest,
            rest_backward,
        )


class _Walk:
    def __init__(self) -> None:
        self.chunks: dict[ChunkKey, _Chunk] = {}
        self._forward: _Chunk | None = None
        self._backward: _Chunk | None = None
        self._index = -1  # of the group whose backward runs; -1: of none yet
        self._at_ms = self._pending_ms = 0.0

    def has_head(self, stage: int) -> bool:
        """Return whether a chunk of this stage has a head."""
        return any(chunk.has_head for key, chunk in self.chunks.items() if key.stage == stage)

    def come_to(self, noted: NotedBoundary) -> None:
        """Add the time since the previous boundary to the work that it was spent on."""
        passed, self._at_ms = self._pending_ms + noted.at_ms - self._at_ms, noted.at_ms
        self._pending_ms = 0.0
        kind, key = noted.kind, noted.chunk
        if kind in (TAIL, LAUNCH) or (key is None and self._backward is None):
            self._mark(noted)
            self._pending_ms = passed
        elif kind is COMMIT and key is not None:
            self._commit(self.chunks[key], noted, passed)
        elif kind is LOSS_DONE and key is not None:
            self.chunks[key].head_backward_ms += passed
        else:
            self._spend(passed)
            self._go_on(noted)

    def _commit(self, chunk: _Chunk, noted: NotedBoundary, passed: float) -> None:
        assert noted.group is not None
        chunk.forward_ms[noted.group.number] = passed
        chunk.groups.append(noted.group)

    def _mark(self, noted: NotedBoundary) -> None:
        if self._forward is None:
            return
        if noted.kind is TAIL:
            self._forward.tail_index = len(self._forward.groups)
        elif noted.kind is LAUNCH:
            self._forward.launch_counts.append(len(self._forward.groups))

    def _spend(self, passed: float) -> None:
        """Add time to the running backward, or else to the end of the forward."""
        if self._backward is not None and 0 <= self._index < len(self._backward.groups):
            self._backward.backward_ms[self._index] = self._backward.backward_ms.get(self._index, 0.0) + passed
        elif self._backward is not None:
            self._backward.rest_backward_ms += passed
        elif self._forward is not None and self._forward.is_in_head:
            self._forward.head_ms += passed
        elif self._forward is not None:
            self._forward.rest_ms += passed

    def _go_on(self, noted: NotedBoundary) -> None:
        kind, key = noted.kind, noted.chunk
        if key is None:
            return
        if kind is FORWARD:
            self._forward = self.chunks[key] = _Chunk(key.microbatch)
            self._backward, self._index = None, -1
        elif kind is HEAD:
            self.chunks[key].is_in_head = self.chunks[key].has_head = True
        elif kind is CHUNK_BACKWARD or (kind is BACKWARD and self._backward is not self.chunks[key]):
            self._forward, self._backward, self._index = None, self.chunks[key], -1
        if kind is BACKWARD and noted.group is not None:
            self._index = noted.group.number
