# SPDX-License-Identifier: Apache-2.0
"""Defines shapes of chunks and bounds: the inputs of a plan, besides the order of forwards and backwards.

All are frozen and hashable, so that a plan can be memoised by them. Names and layers may be known before bytes (then
`nbytes` is 0 everywhere), bytes before times (then every `_ms` is 0): planning needs no times, simulating needs both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

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
    UNKEEP,
    Boundary,
    GroupKey,
)
from offload_engine.schedule import Action, ChunkKey


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One group of a chunk, in the order of its forward.

    Raises:
        ValueError: for a negative size or time.
    """

    name: str
    layer: int = -1
    """Number of its layer in the chunk, from 0; -1: unknown, or outside the layers."""
    nbytes: int = 0
    """Bytes that its copy-out moves; 0: unknown, or nothing."""
    forward_ms: float = 0.0
    """Compute time from its start to its commit."""
    backward_ms: float = 0.0
    """Compute time of its backward."""
    lead_ms: float = 0.0
    """Compute time of the forward from the previous commit, or the start of the chunk, to its start."""
    lead_backward_ms: float = 0.0
    """Compute time from the end of its backward to the start of the next one."""
    may_delay: bool = False
    """Its copy-out may wait for the launch of the experts after it."""
    keep: bool = False
    """Stays resident if the backward of its chunk comes at once, whatever its name and layer."""
    unkeep_count: int | None = None
    """If that backward comes at once, the group is kept until this many groups have committed, as when its module runs
    again; None: to the end."""
    recomputed_bytes: int = 0
    """Not in `nbytes`, but computed again: on the device from the start of its layer's backward to its own end."""

    def __post_init__(self) -> None:
        _check_not_negative(
            self, ("nbytes", "recomputed_bytes", "forward_ms", "backward_ms", "lead_ms", "lead_backward_ms")
        )


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """The contents of one model chunk: the same for every microbatch.

    Raises:
        ValueError: for a negative time, and for an index that is not one of the groups.
    """

    groups: tuple[GroupShape, ...]
    num_layers: int = 0
    """Layers of the chunk; 0: up to the last that has a group."""
    tail_index: int | None = None
    """Number of groups that have begun when the tail of the forward begins; None: there is no tail."""
    launch_counts: tuple[int, ...] = ()
    """Numbers of committed groups at which the device, idle until then, gets work from the host again."""
    has_head: bool = False
    """Logits and loss end its forward."""
    head_ms: float = 0.0
    """Compute time of the head's forward."""
    head_backward_ms: float = 0.0
    """Compute time of the head's backward."""
    rest_ms: float = 0.0
    """Compute time of the forward from the last commit to the head, or to the end."""
    rest_backward_ms: float = 0.0
    """Compute time of the backward from its start, or the end of the head's backward, to the last group."""
    held_counts: tuple[int, ...] = ()
    """Numbers of committed groups at which outside references are declared as no longer read."""
    has_tail_end: bool = False
    """Where the tail has a single group, the end of its backward is reported, and brings the first group back."""

    def __post_init__(self) -> None:
        _check_not_negative(self, ("num_layers", "head_ms", "head_backward_ms", "rest_ms", "rest_backward_ms"))
        unkept = (group.unkeep_count for group in self.groups)
        counts = (count for count in (*unkept, self.tail_index, *self.launch_counts, *self.held_counts))
        for count in counts:
            if count is not None and not 0 <= count <= len(self.groups):
                raise ValueError(f"a tail_index or count must be in [0, {len(self.groups)}], got {count}")

    def kept_at_once(self) -> frozenset[int]:
        """Return the groups that stay if the backward follows at once: of each name the last, in the last two layers.

        Such a backward needs these before they could be copied out and in. Two layers, because a layer may be only an
        attention or an MLP. Groups with `GroupShape.keep` stay as well.
        """
        num_layers = self.num_layers or 1 + max((group.layer for group in self.groups), default=-1)
        last = self.last_index_by_name()
        in_layers = {i for i in last.values() if -1 < self.groups[i].layer >= num_layers - 2}
        return frozenset(in_layers | {i for i, group in enumerate(self.groups) if group.keep})

    @property
    def awaits_tail(self) -> bool:
        """Return whether the first group comes back when the backward of the tail is over; see `awaits_tail`."""
        return self.has_tail_end and awaits_tail([group.name for group in self.groups], self.tail_index)

    def last_index_by_name(self) -> dict[str, int]:
        """Return the index of the last group of each name."""
        return {group.name: index for index, group in enumerate(self.groups)}


Shapes = tuple[ChunkShape, ...]
"""The chunks of one rank, by virtual stage."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a plan, as `OffloadConfig` has them.

    Raises:
        ValueError: for a negative bound, and for another one beside `resident_bytes`, which bounds the same things.
    """

    horizon_bytes: int | None = None
    """Bytes whose copy-in is issued ahead of their use. None: twice the largest group; of a chunk whose backward
    is not near its groups yet, only the last layer."""
    max_inflight_bytes: int | None = None
    """Bytes of copy-out that may be in flight before compute waits for the oldest. None: twice the largest group, and
    less at peaks."""
    resident_bytes: int | None = None
    """Budget for bytes of groups on the device, including the running group. None: everything leaves that may."""

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        _check_not_negative(self, given)
        if self.resident_bytes is not None and len(given) > 1:
            raise ValueError(f"resident_bytes bounds what {given[0]} bounds: set one of them")

    def inflight_limit(self, largest_bytes: int) -> int:
        """Return how many bytes of copy-out may be in flight; `largest_bytes` are those of the largest group."""
        return 2 * largest_bytes if self.max_inflight_bytes is None else self.max_inflight_bytes


def bringing_groups(groups: Sequence[tuple[str, int]], is_combined: bool = False) -> list[int]:
    """Return, for each group, the index of the group whose backward may bring it back; their number: any may.

    That is the next one of its name, a layer ahead: the copy has the backward of a whole layer, and what comes back
    earlier only raises the peak. The last one of a name comes back with the group after it. Where layers are not known,
    groups of one name may differ in everything else, and any may bring them back.

    Where the backward runs together with another forward, a layer takes as long as both. Then a group comes back one
    group later, when the backward of the next one of its name is over: with both in memory the peak would rise.

    Args:
        groups: names and layers of the groups of a chunk, in the order of forward.
        is_combined: another forward runs together with the backward.
    """
    following: dict[str, int] = {}
    bringing = []
    for index in reversed(range(len(groups))):
        name, layer = groups[index]
        next_of_name = following.get(name, index + 1)
        bringing.append(len(groups) if layer == -1 else max(next_of_name - int(is_combined), index + 1))
        following[name] = index
    return bringing[::-1]


def awaits_tail(names: Sequence[str], tail_index: int | None) -> bool:
    """Return whether the end of the tail's backward brings the first group back, not the beginning of its last group.

    Memory peaks in that backward. If a layer has a single group, its copy then has the backward of a block to complete,
    the other one of the last layer. Copies of several groups may take longer: they begin as early as they can.

    Args:
        names: names of the groups of a chunk.
        tail_index: index of the first group of its tail; None or -1: it has no tail.
    """
    return len(names) > 1 and tail_index == len(names) - 1 and names[-2] == names[-1]


def largest_bytes(shapes: Iterable[ChunkShape]) -> int:
    """Return the bytes of the largest group; 0 if none are known."""
    return max((group.nbytes for shape in shapes for group in shape.groups), default=0)


def check_step(actions: Sequence[Action]) -> None:
    """Check that these are the actions of a step.

    Raises:
        ValueError: if one is listed twice, or a backward comes before its forward.
    """
    seen: set[Action] = set()
    for action in actions:
        kind, key = action
        if action in seen:
            raise ValueError(f"{kind}{key.stage}.{key.microbatch} is listed twice")
        if kind == "B" and Action("F", key) not in seen:
            raise ValueError(f"B{key.stage}.{key.microbatch} comes before its forward, or without it")
        seen.add(action)


def step_boundaries(actions: Sequence[Action], shapes: Shapes) -> list[Boundary]:
    """List every boundary of one step of one rank, in order.

    If forward and backward of two chunks run together, those of the forward come first.

    Raises:
        ValueError: for an action of a virtual stage without a shape.
    """
    boundaries: list[Boundary] = []
    for kind, key in actions:
        if key.stage >= len(shapes):
            raise ValueError(f"{kind}{key.stage}.{key.microbatch}: there are shapes of {len(shapes)} virtual stages")
        boundaries += (_forward if kind == "F" else _backward)(key, shapes[key.stage])
    return [*boundaries, Boundary(ITERATION_END)]


def group_keys(actions: Iterable[Action], shapes: Shapes) -> list[GroupKey]:
    """List the groups of one step of one rank, in the order of their forwards."""
    chunks = [action.chunk for action in actions if action.kind == "F"]
    return [GroupKey(key, index) for key in chunks for index in range(len(shapes[key.stage].groups))]


def _forward(key: ChunkKey, shape: ChunkShape) -> Iterator[Boundary]:
    yield Boundary(FORWARD, key)
    yield from _marks(key, shape, 0)
    for index in range(len(shape.groups)):
        yield Boundary(COMMIT, key, index)
        yield from _marks(key, shape, index + 1)
    if shape.has_head:
        yield Boundary(HEAD, key)
    yield Boundary(FORWARD_END, key)


def _marks(key: ChunkKey, shape: ChunkShape, num_committed: int) -> Iterator[Boundary]:
    if num_committed in shape.launch_counts:
        yield Boundary(LAUNCH, key, num_committed)
    if num_committed in shape.held_counts:
        yield Boundary(HELD, key, num_committed)
    for index, group in enumerate(shape.groups[:num_committed]):
        if num_committed == group.unkeep_count:
            yield Boundary(UNKEEP, key, index)
    if num_committed == shape.tail_index:
        yield Boundary(TAIL, key)


def _backward(key: ChunkKey, shape: ChunkShape) -> Iterator[Boundary]:
    yield Boundary(CHUNK_BACKWARD, key)
    if shape.has_head:
        yield Boundary(LOSS_DONE, key)
    for index in reversed(range(len(shape.groups))):
        yield Boundary(BACKWARD, key, index)
        yield Boundary(BACKWARD_END, key, index)


def _check_not_negative(record: object, names: Iterable[str]) -> None:
    for name in names:
        if getattr(record, name) < 0:
            raise ValueError(f"{name} must not be negative, got {getattr(record, name)}")
