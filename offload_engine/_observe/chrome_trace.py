# SPDX-License-Identifier: Apache-2.0
"""Writes recorded steps as a Chrome trace, for Perfetto, on the time base of `torch.profiler`, with the records inside.

A trace of `torch.profiler` counts microseconds from a moment that it gives as nanoseconds since 1970
(`baseTimeNanoseconds`, the last multiple of about three months). So does this one, so they merge exactly.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

from offload_engine._observe.pace import Pace, at_once
from offload_engine._observe.record import StepRecord, from_json, to_json
from offload_engine.planning.moves import OUT

RECORDS: Final = "offloadEngineSteps"
"""The key in the file under which the records are."""
_BASE: Final = "baseTimeNanoseconds"
_BASE_STEP_NS: Final = 7_889_238 * 10**9  # as in Kineto
_FIRST_PID: Final = 10_000_000  # beyond those of processes, which `torch.profiler` uses, and of GPUs
_WAITS, _OUT, _IN, _MOVES, _FIRST_LANE = 1, 2, 3, 4, 10  # threads
_MIB: Final = 1 << 20

Event = dict[str, Any]
File = str | os.PathLike[str]


def write_trace(records: StepRecord | Sequence[StepRecord], file: File, pace: Pace = at_once) -> Path:
    """Write the steps of any number of ranks, compressed if the name ends in `.gz`. Returns the path."""
    records = [records] if isinstance(records, StepRecord) else list(records)
    base_ns = _base_of(min((record.begin_unix_ns for record in records), default=0))
    events = [event for record in records for event in trace_events(record, base_ns, pace)]
    plain = [to_json(record, pace) for record in records]
    return _write({"displayTimeUnit": "ms", _BASE: base_ns, "traceEvents": events, RECORDS: plain}, file, pace)


def read_records(file: File) -> list[StepRecord]:
    """Read the records from a file of `write_trace` or `merge`.

    Raises:
        ValueError: if the file has no recorded step, or one of another version; names the file.
    """
    found = _read(file).get(RECORDS)
    if not found:
        raise ValueError(
            f"{os.fspath(file)} has no recorded step: expected a file of engine.record(FILE) or --offload-trace"
        )
    try:
        return [from_json(data) for data in found]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = error if isinstance(error, ValueError) else "it is damaged"
        raise ValueError(f"{os.fspath(file)}: {reason}") from error


def merge(files: Sequence[File], file: File) -> Path:
    """Merge several traces into one: recorded steps, and traces of `torch.profiler` from the same time.

    Returns the path of the merged trace. Its time base is that of the last of `files`.

    Raises:
        ValueError: if one of `files` is not a trace, or does not say when its time begins; names the file.
    """
    traces = [_read(each) for each in files]
    for each, trace in zip(files, traces, strict=True):
        if _BASE not in trace:
            raise ValueError(f"{os.fspath(each)} has no {_BASE}: expected a trace of torch 2.2 or later")
    last = traces[-1]
    events = [event for trace in traces for event in _shifted(trace, (trace[_BASE] - last[_BASE]) / 1e3)]
    records = [record for trace in traces for record in trace.get(RECORDS, ())]
    return _write({**last, "traceEvents": events, RECORDS: records}, file)


def _shifted(trace: Mapping[str, Any], shift_us: float) -> Iterator[Event]:
    for event in trace["traceEvents"]:
        yield {**event, "ts": event["ts"] + shift_us} if "ts" in event else event


def trace_events(record: StepRecord, base_ns: int, pace: Pace = at_once) -> list[Event]:
    """Return the events of one rank: names of its tracks first, then all others in the order of time."""
    pid = _FIRST_PID + record.rank
    names = {group.group: f"{group.name} {group.group}" for group in record.groups}
    at = _clock(record, base_ns)
    lanes = _lanes(record)
    tracks = (_slices(record, names, at), _stages(record, names, lanes, at), _counters(record, at), _moves(record, at))
    events = list(pace(chain.from_iterable(tracks)))
    threads = {_WAITS: "compute waits", _OUT: "copy-outs", _IN: "copy-ins", _MOVES: "moves (host time)"}
    threads |= {_FIRST_LANE + lane: f"groups {lane}" for lane in sorted(set(lanes.values()))}
    metadata = list(_metadata(f"offload engine, rank {record.rank}, step {record.step}", threads))
    return [{**event, "pid": pid} for event in (*metadata, *sorted(events, key=lambda event: float(event["ts"])))]


def _clock(record: StepRecord, base_ns: int) -> Callable[[float], int]:
    """Return a function from milliseconds of the step to nanoseconds since the base."""
    return lambda milliseconds: record.begin_unix_ns - base_ns + round(milliseconds * 1e6)


def _slices(record: StepRecord, names: dict[str, str], at: Callable[[float], int]) -> Iterator[Event]:
    for wait in record.waits:
        name = f"wait for {wait.awaited.value} of {names.get(wait.group, wait.group)}"
        yield _slice(name, _WAITS, at(wait.begin_ms), at(wait.end_ms), group=wait.group)
    for copy in record.copies:
        name, tid = names.get(copy.group, copy.group), _OUT if copy.op is OUT else _IN
        duration_ms = copy.end_ms - copy.begin_ms
        rate = round(copy.nbytes / duration_ms / 1e6, 3) if duration_ms > 0 else None
        lag_ms = round(copy.begin_ms - copy.issued_ms, 3)
        more = {"group": copy.group, "bytes": copy.nbytes, "GB/s": rate, "begun after issue, ms": lag_ms}
        yield _slice(name, tid, at(copy.begin_ms), at(copy.end_ms), **more)


def _stages(
    record: StepRecord, names: dict[str, str], lanes: dict[str, int], at: Callable[[float], int]
) -> Iterator[Event]:
    for stage in record.stages:
        name = f"{names.get(stage.group, stage.group)} {stage.residency}"
        tid = _FIRST_LANE + lanes[stage.group]
        yield _slice(name, tid, at(stage.begin_ms), at(stage.end_ms), group=stage.group, residency=stage.residency)


def _lanes(record: StepRecord) -> dict[str, int]:
    """Assign each group to the first track that no other group uses at the same time."""
    lives: dict[str, tuple[float, float]] = {}
    for stage in record.stages:
        begin, end = lives.get(stage.group, (stage.begin_ms, stage.end_ms))
        lives[stage.group] = min(begin, stage.begin_ms), max(end, stage.end_ms)
    lanes: dict[str, int] = {}
    ends: list[float] = []
    for group, (begin, end) in sorted(lives.items(), key=lambda item: item[1]):
        lane = next((i for i, taken in enumerate(ends) if taken <= begin), len(ends))
        ends[lane : lane + 1] = [end]
        lanes[group] = lane
    return lanes


def _counters(record: StepRecord, at: Callable[[float], int]) -> Iterator[Event]:
    for counter in record.counters:
        values = (counter.resident_bytes, counter.inflight_bytes, counter.host_bytes)
        for name, nbytes in zip(("resident", "in flight", "on host"), values, strict=True):
            yield {"ph": "C", "name": name, "ts": at(counter.host_ms) / 1e3, "args": {"MiB": nbytes / _MIB}}


def _slice(name: str, tid: int, begin_ns: int, end_ns: int, **more: Any) -> Event:
    # Whole nanoseconds on both sides, so that the next slice does not overlap.
    times = {"ts": begin_ns / 1e3, "dur": (end_ns - begin_ns) / 1e3}
    return {"ph": "X", "cat": "offload", "name": name, "tid": tid, **times, "args": more}


def _moves(record: StepRecord, at: Callable[[float], int]) -> Iterator[Event]:
    for move in record.moves:
        what = {"ph": "i", "s": "t", "cat": "offload", "name": f"{move.op.value} {move.group}", "tid": _MOVES}
        yield {**what, "ts": at(move.host_ms) / 1e3, "args": {"boundary": move.boundary, "bytes": move.nbytes}}


def _metadata(process: str, threads: dict[int, str]) -> Iterable[Event]:
    yield {"ph": "M", "name": "process_name", "tid": 0, "args": {"name": process}}
    for tid, name in threads.items():
        yield {"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "tid": tid, "args": {"sort_index": tid}}


def _base_of(unix_ns: int) -> int:
    return unix_ns - unix_ns % _BASE_STEP_NS


def _write(trace: dict[str, Any], file: File, pace: Pace = at_once) -> Path:
    path = Path(file)
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as target:
        target.writelines(pace(json.JSONEncoder(separators=(",", ":")).iterencode(trace)))
    return path


def _read(file: File) -> dict[str, Any]:
    path = Path(file)
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as source:
            trace = json.load(source)
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a trace: not complete, or not JSON ({error})") from error
    if not isinstance(trace, dict):
        raise ValueError(
            f"{path} is not a trace with a time base: expected a JSON object, got a {type(trace).__name__}"
        )
    return trace
