# SPDX-License-Identifier: Apache-2.0
"""Assembles a `StepRecord` from notes: marks become milliseconds, and each storage gets the reason for its fate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from offload_engine._devices.base import Device, Stream, TimeMark
from offload_engine._observe.notes import (
    NotedBoundary,
    NotedCopy,
    NotedMove,
    NotedSave,
    NotedStage,
    NotedWait,
    Notes,
    key_of,
)
from offload_engine._observe.pace import Pace, at_once
from offload_engine._observe.reasons import Reason
from offload_engine._observe.record import (
    CopyRecord,
    CounterRecord,
    GroupRecord,
    MoveRecord,
    SavedRecord,
    StageRecord,
    StepRecord,
    WaitRecord,
)
from offload_engine.planning.moves import Boundary, BoundaryKind, GroupKey

_NUM_TRIES: Final = 5


class Origin(NamedTuple):
    """The moment at which the device began a step, on every clock."""

    device: Device
    mark: TimeMark
    host_ns: int
    unix_ns: int

    def device_ms(self, mark: TimeMark) -> float:
        """Return the time of a mark since the step began; blocks until it has come."""
        return self.device.milliseconds_between(self.mark, mark)

    def host_ms(self, host_ns: int) -> float:
        """Convert a time of the host into milliseconds since the step began."""
        return (host_ns - self.host_ns) / 1e6

    def after(self, milliseconds: float) -> Origin:
        """Return the origin if the device reached its mark this much later than the host."""
        lag_ns = round(milliseconds * 1e6)
        return self._replace(host_ns=self.host_ns + lag_ns, unix_ns=self.unix_ns + lag_ns)


class About(NamedTuple):
    """The facts about a step that are known when it begins; see `Recorder`."""

    rank: int
    step: int
    pipeline: tuple[int, int]
    fallback: Reason


def lag_ms(origin: Origin, stream: Stream, clock: Callable[[], int]) -> float:
    """Return how much later than the host the device reached the origin, to about ten microseconds.

    Blocks until the work queued on `stream` is over, several times: the host learns of its end late, and later still
    while other threads keep Python busy.
    """
    heard = []
    for _ in range(_NUM_TRIES):
        passed_ms = origin.device_ms(origin.device.mark_time(stream))
        heard.append(origin.host_ms(clock()) - passed_ms)
    return max(0.0, min(heard))


def assemble(
    notes: Notes, origin: Origin, end: TimeMark, about: About, counts: dict[str, int], pace: Pace = at_once
) -> StepRecord:
    """Make the record of a step whose last mark is `end`; blocks until the device has passed it."""
    duration_ms = origin.device_ms(end)
    memory = origin.device.memory
    return StepRecord(
        rank=about.rank,
        step=about.step,
        begin_unix_ns=origin.unix_ns,
        duration_ms=duration_ms,
        counts=counts,
        groups=tuple(GroupRecord(str(key), *traits) for key, traits in pace(sorted(notes.groups.items()))),
        moves=_moves(pace(notes.moves), origin),
        copies=_copies(pace(notes.copies), origin),
        waits=waits_of(pace(notes.waits), origin),
        stages=_stages(pace(notes.stages), origin, duration_ms),
        counters=tuple(CounterRecord(origin.host_ms(at), *values) for at, *values in pace(notes.counters)),
        saved=tuple(_saved(save, notes, about.fallback) for save in pace(notes.saved)),
        pipeline_rank=about.pipeline[0],
        num_pipeline_ranks=about.pipeline[1],
        device_bytes=0 if memory is None else memory.total_bytes(),
    )


def boundary_text(boundary: NotedBoundary | None) -> str:
    """Return a boundary as `str(Boundary)`; empty for None."""
    if boundary is None:
        return ""
    if boundary.chunk is None and boundary.kind is not BoundaryKind.ITERATION_END:
        return boundary.kind.name.lower()
    return str(Boundary(*boundary))


def _moves(moves: Iterable[NotedMove], origin: Origin) -> tuple[MoveRecord, ...]:
    return tuple(
        MoveRecord(origin.host_ms(move.host_ns), boundary_text(move.boundary), move.op, str(move.group), move.nbytes)
        for move in moves
    )


def _copies(copies: Iterable[NotedCopy], origin: Origin) -> tuple[CopyRecord, ...]:
    return tuple(
        CopyRecord(
            copy.op,
            str(copy.group),
            copy.nbytes,
            origin.host_ms(copy.host_ns),
            begin := origin.device_ms(copy.begin),
            max(begin, origin.device_ms(copy.end)),
        )
        for copy in copies
    )


def waits_of(waits: Iterable[NotedWait], origin: Origin) -> tuple[WaitRecord, ...]:
    """Return waits with their times; blocks until the device has come to them."""
    return tuple(
        WaitRecord(
            wait.awaited,
            str(wait.group),
            begin := origin.device_ms(wait.begin),
            max(begin, origin.device_ms(wait.end)),
        )
        for wait in waits
    )


def _stages(stages: Iterable[NotedStage], origin: Origin, duration_ms: float) -> tuple[StageRecord, ...]:
    """Make stages from moments: each lasts until the next one of its group, the last until the step ends."""
    begins: dict[GroupKey, list[tuple[str, float]]] = {}
    for stage in stages:
        of_group = begins.setdefault(GroupKey(stage.group.chunk, stage.group.index), [])
        earliest = of_group[-1][1] if of_group else float("-inf")  # streams differ: a stage begins after the one before
        of_group.append((stage.residency, max(earliest, origin.device_ms(stage.begin))))
    found = []
    for group, of_group in sorted(begins.items()):
        ends = [begin for _, begin in of_group[1:]] + [max(duration_ms, of_group[-1][1])]
        for (residency, begin), end in zip(of_group, ends, strict=True):
            if residency != "retired":
                found.append(StageRecord(str(group), residency, begin, end))
    return tuple(found)


def _saved(save: NotedSave, notes: Notes, fallback: Reason) -> SavedRecord:
    key, chunk = key_of(save.group), save.group.chunk
    group, name = (f"{chunk.stage}.{chunk.microbatch}", "") if key is None else (str(key), save.group.name)
    dtype = str(save.dtype).removeprefix("torch.")
    reason = save.reason or _fate(save.storage, notes, fallback)
    return SavedRecord(group, name, save.module, tuple(save.shape), dtype, save.nbytes, save.storage, reason)


def _fate(storage: int, notes: Notes, fallback: Reason) -> Reason:
    fate = notes.fates[storage]
    if fate.reason is not None:
        return fate.reason
    if fate.group is None:
        return Reason.NOT_ASKED
    key = GroupKey(fate.group.chunk, fate.group.index)
    if notes.groups[key].is_kept:
        return Reason.KEPT
    return notes.group_reasons.get(key, fallback)
