# SPDX-License-Identifier: Apache-2.0
"""Defines the notes that a recorder collects during a step, and protocols of the objects that it reads."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from offload_engine._devices.base import Stream, TimeMark
from offload_engine._observe.reasons import Reason
from offload_engine._observe.record import Awaited
from offload_engine.planning.moves import BoundaryKind, GroupKey, Op
from offload_engine.schedule import ChunkKey


class ObservedGroup(Protocol):
    """The attributes of a group that a recorder reads. The index changes up to the commit."""

    @property
    def chunk(self) -> ChunkKey: ...

    @property
    def index(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def layer(self) -> int: ...

    @property
    def is_kept(self) -> bool: ...

    @property
    def is_ungrouped(self) -> bool: ...

    @property
    def own_bytes(self) -> int: ...


class ObservedStorage(Protocol):
    """The attributes of a saved storage that a recorder reads; it keeps a reference until the storage retires."""

    @property
    def group(self) -> ObservedGroup: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def stream(self) -> Stream: ...


class NotedBoundary(NamedTuple):
    """A boundary, not yet text."""

    kind: BoundaryKind
    chunk: ChunkKey | None
    number: int
    """`Boundary.index`, which would clash with the method of tuples."""


class NotedMove(NamedTuple):
    """See `MoveRecord`; host times are of the recorder's clock."""

    host_ns: int
    boundary: NotedBoundary | None
    op: Op
    group: GroupKey
    nbytes: int


class NotedCopy(NamedTuple):
    """See `CopyRecord`."""

    op: Op
    group: GroupKey
    nbytes: int
    host_ns: int
    begin: TimeMark
    end: TimeMark


class NotedWait(NamedTuple):
    """See `WaitRecord`."""

    awaited: Awaited
    group: GroupKey
    begin: TimeMark
    end: TimeMark


class NotedStage(NamedTuple):
    """The moment at which a group reached a place."""

    group: ObservedGroup
    residency: str
    begin: TimeMark


class NotedSave(NamedTuple):
    """See `SavedRecord`."""

    group: ObservedGroup
    module: str
    shape: tuple[int, ...]
    dtype: Any
    nbytes: int
    storage: int
    reason: Reason | None
    """None: the reason follows from the fate of the storage, or of its group."""


class NotedGroup(NamedTuple):
    """See `GroupRecord`."""

    name: str
    layer: int
    is_kept: bool
    own_bytes: int


class StorageFate:
    """The fate of one storage so far."""

    __slots__ = ("group", "reason")

    def __init__(self) -> None:
        self.group: ObservedGroup | None = None  # the first to save it; None: saved outside every group only
        self.reason: Reason | None = None


class Notes:
    """Everything noted in one step, in the order in which it was noted."""

    def __init__(self) -> None:
        self.groups: dict[GroupKey, NotedGroup] = {}
        self.group_reasons: dict[GroupKey, Reason] = {}
        self.moves: list[NotedMove] = []
        self.copies: list[NotedCopy] = []
        self.waits: list[NotedWait] = []
        self.stages: list[NotedStage] = []
        self.counters: list[tuple[int, int, int, int]] = []
        self.saved: list[NotedSave] = []
        self.fates: list[StorageFate] = []


def key_of(group: ObservedGroup) -> GroupKey | None:
    """Return the key of a group; None for tensors that a chunk saves outside its groups."""
    return None if group.is_ungrouped else GroupKey(group.chunk, group.index)
