# SPDX-License-Identifier: Apache-2.0
"""Holds one recorded step of one rank as plain data: moves, copies and waits with times, and the fate of saved tensors.

Times are milliseconds since the device began the step. Times of the host are read when the engine is called. The device
gets there later; if the host is ahead even of the start of the step, they are negative. Without a file the clocks are
not compared, and times of the host count from when the host began.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar

from offload_engine._observe.pace import Pace, at_once
from offload_engine._observe.reasons import Reason
from offload_engine.planning.moves import Op

VERSION: Final = 1
_SHORTEST_WAIT_MS: Final = 0.005  # two marks with nothing between them are 1.5 microseconds apart on an H100


class Awaited(enum.Enum):
    """What compute waited for."""

    COPY_OUT = "copy_out"
    """The end of a copy-out, to release device bytes."""
    COPY_IN = "copy_in"
    """The end of a copy-in, to use what it brings."""


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One group."""

    group: str
    """As `0.3:5`: group 5 of stage 0, microbatch 3."""
    name: str
    layer: int
    """Number of its layer in the chunk, from 0; -1 if unknown."""
    is_kept: bool
    own_bytes: int
    """Bytes of the storages that no group saved before."""


@dataclass(frozen=True, slots=True)
class MoveRecord:
    """One move that was performed."""

    host_ms: float
    boundary: str
    """Boundary at which it happened, as `F0.3:5`; empty before the first."""
    op: Op
    group: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class CopyRecord:
    """The copies of one group that were issued together."""

    op: Op
    """OUT or IN."""
    group: str
    nbytes: int
    issued_ms: float
    """Host time."""
    begin_ms: float
    """Device time, as the next one: the copy stream had passed its own waits."""
    end_ms: float


@dataclass(frozen=True, slots=True)
class WaitRecord:
    """A time in which a compute stream waited for a copy; device time."""

    awaited: Awaited
    group: str
    begin_ms: float
    end_ms: float

    @property
    def exposed_ms(self) -> float:
        """Return how long compute waited; 0 if that is within the error of two marks."""
        milliseconds = self.end_ms - self.begin_ms
        return milliseconds if milliseconds > _SHORTEST_WAIT_MS else 0.0


@dataclass(frozen=True, slots=True)
class StageRecord:
    """A time that a group spent in one place, as its last storage did; device time."""

    group: str
    residency: str
    """As the values of `Residency`; "used" is resident again after a copy-in or a recall."""
    begin_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class CounterRecord:
    """Bytes at one moment; host time."""

    host_ms: float
    resident_bytes: int
    inflight_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class SavedRecord:
    """One tensor that autograd saved."""

    group: str
    """The open group; if none was open, the chunk, as `0.3`."""
    name: str
    """Name of the group; empty if none was open."""
    module: str
    """The innermost module whose forward ran, as `decoder.layers.0.mlp`; empty if unknown."""
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    """Bytes of its storage."""
    storage: int
    """Number of its storage in this step, equal for tensors that share one; -1 if it was no candidate to move."""
    reason: Reason


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The record of one step of one rank."""

    rank: int
    step: int
    begin_unix_ns: int
    """When the step began: the origin of all times, in nanoseconds since 1970."""
    duration_ms: float
    """Device time from begin to end."""
    counts: dict[str, int]
    """The counters of `IterationStats` at its end."""
    groups: tuple[GroupRecord, ...]
    moves: tuple[MoveRecord, ...]
    copies: tuple[CopyRecord, ...]
    waits: tuple[WaitRecord, ...]
    stages: tuple[StageRecord, ...]
    counters: tuple[CounterRecord, ...]
    saved: tuple[SavedRecord, ...]
    pipeline_rank: int = 0
    """Rank in the pipeline whose stages the chunks are."""
    num_pipeline_ranks: int = 1
    device_bytes: int = 0
    """Memory of the GPU; 0: not known, or there is none."""

    def stage_of(self, group: str) -> int:
        """Return the stage of a group, `0.3:5`, or of a chunk, `0.3`, counted over all ranks of the pipeline."""
        return int(group.partition(".")[0]) * self.num_pipeline_ranks + self.pipeline_rank


_TABLES: Final[Mapping[str, type[Any]]] = {
    "groups": GroupRecord,
    "moves": MoveRecord,
    "copies": CopyRecord,
    "waits": WaitRecord,
    "stages": StageRecord,
    "counters": CounterRecord,
    "saved": SavedRecord,
}
_PARSERS: Final[Mapping[str, Any]] = {"op": Op, "awaited": Awaited, "reason": Reason, "shape": tuple}
T = TypeVar("T")


def to_json(record: StepRecord, pace: Pace = at_once) -> dict[str, Any]:
    """Convert a record into objects for `json.dumps`; each table is its columns and its rows."""
    plain = {field.name: getattr(record, field.name) for field in fields(record) if field.name not in _TABLES}
    tables = {name: _to_table(kind, pace(getattr(record, name))) for name, kind in _TABLES.items()}
    return {"version": VERSION, **plain, **tables}


def from_json(data: Mapping[str, Any]) -> StepRecord:
    """Convert back; the exact inverse of `to_json`.

    Raises:
        ValueError: if it was written by another version.
    """
    if data.get("version") != VERSION:
        raise ValueError(
            f"a recorded step of version {data.get('version')!r}, expected {VERSION}: record the step again, or read "
            "it with the version of offload_engine that wrote it"
        )
    values: dict[str, Any] = {key: value for key, value in data.items() if key != "version"}
    for name, kind in _TABLES.items():
        values[name] = _from_table(kind, data[name])
    return StepRecord(**values)


def _to_table(kind: type[Any], rows: Iterable[Any]) -> dict[str, Any]:
    columns = [field.name for field in fields(kind)]
    return {"columns": columns, "rows": [[_plain(getattr(row, name)) for name in columns] for row in rows]}


def _from_table(kind: type[T], table: Mapping[str, Any]) -> tuple[T, ...]:
    columns = table["columns"]
    parsers = [_PARSERS.get(name, _same) for name in columns]
    return tuple(
        kind(**{name: parse(value) for name, parse, value in zip(columns, parsers, row, strict=True)})
        for row in table["rows"]
    )


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    return list(value) if isinstance(value, tuple) else value


def _same(value: Any) -> Any:
    return value
