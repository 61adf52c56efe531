# SPDX-License-Identifier: Apache-2.0
"""Describes the allocations of one step: when each block of memory was allocated and freed, and which storage it held.

A moment is a number of events: those with a smaller index have happened.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from offload_engine.planning.choices import Slot, slots_of
from offload_engine.planning.moves import COMMIT, Boundary, GroupKey
from offload_engine.planning.segments import Reserved, Segment, is_small_block, rounded
from offload_engine.planning.shapes import Shapes

ALLOCATED: Final = 0
FREE_ASKED: Final = 1
"""Its owner has freed it; it may be in use on another stream."""
FREED: Final = 2
_ALIKE: Final = 1.004
"""How many times its bytes a step may have been planned with that is like its plan."""


class Event(NamedTuple):
    """Something that an allocator has done."""

    kind: int
    at: int
    """Address."""
    nbytes: int
    stream: int


class AllocationLog(NamedTuple):
    """What an allocator has done in a step, and its segments afterwards."""

    events: tuple[Event, ...]
    segments: tuple[Segment, ...]


class Life:
    """The use of one block, from its allocation until it is freed.

    Attributes:
        at: its address.
        nbytes: requested.
        stream: whose pool it is from.
        begins: index of the event; -1: before the step.
        ends: index of the event; None: after the step.
        lag: number of events after its end for which another stream still used it: only then it was free.
    """

    __slots__ = ("at", "nbytes", "stream", "begins", "ends", "lag")

    def __init__(self, at: int, nbytes: int, stream: int, begins: int = -1, ends: int | None = None) -> None:
        self.at = at
        self.nbytes = nbytes
        self.stream = stream
        self.begins = begins
        self.ends = ends
        self.lag = 0


@dataclass
class NotedStorage:
    """What an engine has noted of a storage that autograd saved. Times count allocations and frees that were asked."""

    savers: list[GroupKey]
    """The groups that saved it; it moves with the first."""
    saved: tuple[int, int] = (0, 0)
    """Address, and a time at which it was there."""
    returned: tuple[int, int] | None = None
    """Address, and a time at which it was there, if it was copied in."""
    retired: int | None = None
    """The last time that is known before it, if its last handle has been dropped."""


@dataclass
class NotedRun:
    """What a model has noted of the forward of a module that it could recompute, in times."""

    name: str
    """Name of the recomputation."""
    begins: int
    input_at: int = 0
    """Address of what the recomputation starts from; 0: not known."""
    ends: int | None = None
    backward: int | None = None
    """When its backward has begun."""


class NotedMoves(NamedTuple):
    """A boundary, the time when the engine came to it, and when it had performed its moves."""

    boundary: Boundary
    begins: int
    ends: int


class StoredLives(NamedTuple):
    """Where the bytes of a storage were."""

    saved: Life
    returned: Life | None
    is_released: bool
    """The engine has freed the first, by a move; otherwise that was another owner."""
    retired: int | None
    """Moment, if its last handle has been dropped."""
    last_saver: GroupKey


class ModuleRun(NamedTuple):
    """The forward of a module that could be recomputed, and the begin of its backward, by their moments."""

    name: str
    begins: int
    ends: int
    backward: int
    input: Life | None = None


@dataclass
class RecordedStep:
    """The allocations of a step in which everything was offloaded."""

    segments: tuple[Segment, ...]
    """At its end."""
    num_events: int
    lives: list[Life]
    successors: dict[int, Life]
    """By the `id` of a life that the step found and ended: one like it that the step leaves behind."""
    moments: dict[Boundary, int] = field(default_factory=dict)
    stored: dict[GroupKey, list[StoredLives]] = field(default_factory=dict)
    """Of storages that move with a group, in the order of saving."""
    runs: list[ModuleRun] = field(default_factory=list)
    most_events: int = 0
    """Of the ranks that decide alike: all replay as often."""
    left_out: frozenset[int] = frozenset()
    """Microbatches whose allocations are not here, since those of others are the same."""
    is_exact: bool = True
    """In what other microbatches, and those of later steps, are like these: to the byte, or nearly."""
    small: Reserved | None = None
    """What small blocks come to if nothing moves, once that is known."""

    def __post_init__(self) -> None:
        self._in_order = [life for life in self.lives if life.begins >= 0]
        by_stream: dict[int, int] = {0: 0}
        for life in self._in_order:
            by_stream[life.stream] = by_stream.get(life.stream, 0) + life.nbytes
        self.main_stream: int = max(by_stream, key=lambda stream: by_stream[stream])  # allocates most
        # Of one of the ranks that decide alike.
        self.has_lags: bool = any(life.lag and not is_small_block(life.nbytes) for life in self.lives)

    def sizes(self) -> dict[GroupKey, int]:
        """Return the bytes of each group that moves."""
        return {group: sum(each.saved.nbytes for each in stored) for group, stored in self.stored.items()}

    def fewer_bytes(self, shapes: Shapes, recomputed: Collection[Slot]) -> dict[GroupKey, int]:
        """Return the bytes of groups that had fewer here than by these shapes; of what is recomputed nothing is known.

        Args:
            shapes: by which steps are planned.
            recomputed: slots of groups.
        """
        slots = [slots_of(stage, shape.groups) for stage, shape in enumerate(shapes)]
        return {
            GroupKey(chunk, index): nbytes
            for (chunk, index), nbytes in self.sizes().items()
            if nbytes < shapes[chunk.stage].groups[index].nbytes and slots[chunk.stage][index] not in recomputed
        }

    def is_like(self, shapes: Shapes) -> bool:
        """Return whether groups have had nearly all bytes of these shapes, in each microbatch."""
        sizes = self.sizes()
        planned = sum(shapes[group.chunk.stage].groups[group.index].nbytes for group in sizes)
        return planned <= _ALIKE * sum(sizes.values())

    def begun_between(self, begin: int, end: int) -> list[Life]:
        """Return the lives that began in the step, at or after one moment and before another, in order."""
        first, behind = (bisect.bisect_left(self._in_order, moment, key=_begin_of) for moment in (begin, end))
        return self._in_order[first:behind]


def _begin_of(life: Life) -> int:
    return life.begins


def recorded_step(
    log: AllocationLog,
    boundaries: Sequence[NotedMoves],
    storages: Iterable[NotedStorage],
    runs: Iterable[NotedRun] = (),
) -> RecordedStep:
    """Put together what the allocator and the engine have noted."""
    order = _Order(log.events)
    lives = _lives_of(log)
    found = RecordedStep(log.segments, len(log.events), lives, _successors(lives), most_events=len(log.events))
    for noted in boundaries:
        found.moments.setdefault(noted.boundary, order.index_of(noted.begins))
    moving = [(order.index_of(noted.begins), order.index_of(noted.ends)) for noted in boundaries]
    at: dict[int, list[Life]] = {}
    for life in lives:
        at.setdefault(life.at, []).append(life)
    for storage in storages:
        lived = _stored(storage, at, order, moving, found.moments)
        if lived is not None:
            found.stored.setdefault(storage.savers[0], []).append(lived)
    for run in runs:
        if run.ends is not None and run.backward is not None:
            begins, ends, backward = map(order.index_of, (run.begins, run.ends, run.backward))
            found.runs.append(ModuleRun(run.name, begins, ends, backward, _alive_at(at, run.input_at, begins)))
    return found


class _Order:
    """Finds the index of the event at a time, which counts allocations and frees that were asked."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._counted = [index for index, event in enumerate(events) if event.kind != FREED]
        self._num_events = len(events)

    def index_of(self, time: int) -> int:
        return self._counted[time] if 0 <= time < len(self._counted) else self._num_events


def _lives_of(log: AllocationLog) -> list[Life]:
    lives: list[Life] = []
    alive: dict[int, Life] = {}
    asked: dict[int, int] = {}
    for index, (kind, at, nbytes, stream) in enumerate(log.events):
        if kind == ALLOCATED:
            alive[at] = Life(at, nbytes, stream, index)
            lives.append(alive[at])
        elif kind == FREE_ASKED:
            asked[at] = index
        else:
            life = alive.pop(at, None)
            if life is None:
                life = Life(at, nbytes, stream)
                lives.append(life)
            life.ends = asked.pop(at, index - 1) + 1
            life.lag = index - life.ends
    return lives


def _successors(lives: Iterable[Life]) -> dict[int, Life]:
    """Match what the step has found and ended with what it leaves behind, as gradients are freed and made again."""
    left: dict[tuple[int, int], list[Life]] = {}
    ended = []
    for life in lives:
        if life.begins < 0:
            ended.append(life)
        elif life.ends is None:
            left.setdefault((rounded(life.nbytes), life.stream), []).append(life)
    found = {}
    for life in ended:
        alike = left.get((rounded(life.nbytes), life.stream))
        if alike:
            found[id(life)] = alike.pop(0)
    return found


def _stored(
    storage: NotedStorage,
    at: Mapping[int, Sequence[Life]],
    order: _Order,
    moving: Sequence[tuple[int, int]],
    moments: Mapping[Boundary, int],
) -> StoredLives | None:
    saved = _alive_at(at, storage.saved[0], order.index_of(storage.saved[1]))
    if saved is None:
        return None
    returned = None
    if storage.returned is not None:
        returned = _alive_at(at, storage.returned[0], order.index_of(storage.returned[1]))
    retired = None if storage.retired is None else order.index_of(storage.retired)
    last = max(storage.savers, key=lambda group: moments.get(Boundary(COMMIT, *group), -1))
    return StoredLives(saved, returned, _is_within(saved.ends, moving), retired, last)


def _alive_at(at: Mapping[int, Sequence[Life]], address: int, moment: int) -> Life | None:
    """Return what was at an address: of lives that follow each other the last that has begun."""
    for life in reversed(at.get(address, ())):
        if life.begins < moment:
            return life if life.ends is None or life.ends >= moment else None
    return None


def _is_within(index: int | None, spans: Sequence[tuple[int, int]]) -> bool:
    if index is None:
        return False
    place = bisect.bisect_right(spans, (index, 1 << 62)) - 1
    return place >= 0 and spans[place][0] <= index < spans[place][1]
