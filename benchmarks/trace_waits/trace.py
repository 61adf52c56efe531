# SPDX-License-Identifier: Apache-2.0
"""Reads a chrome trace of torch's profiler: what the streams did, and when the host waited."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .spans import Span

Event = dict[str, Any]

# Without cudaDeviceSynchronize, with which the profiled step ends.
_SYNCHRONIZE = frozenset({"cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMemcpyAsync"})
_QUERY = "cudaEventQuery"
_READS = frozenset({"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::to"})
_SPIN_GAP_US = 20.0  # between two queries of a spin there is little Python


class Copy(NamedTuple):
    """A copy between device and host, on the device."""

    span: Span
    nbytes: int
    is_out: bool
    issued: float
    """When the host called for it."""


class Kernel(NamedTuple):
    """A kernel, or what runs in its place: a memory set, or a copy on the device."""

    span: Span
    name: str
    issued: float
    """When the host called for it."""


class HostWait(NamedTuple):
    """A call in which the host waited."""

    what: str
    span: Span


@dataclass
class Trace:
    """One step of one rank, times in microseconds since the first event."""

    kernels: dict[int, list[Kernel]] = field(default_factory=lambda: defaultdict(list))
    """By stream."""
    copies: list[Copy] = field(default_factory=list)
    waits: list[HostWait] = field(default_factory=list)
    begin: float = 0.0
    end: float = 0.0

    @property
    def compute_stream(self) -> int | None:
        """Return the stream on which kernels ran longest."""
        return max(self.kernels, key=lambda s: sum(kernel.span.length for kernel in self.kernels[s]), default=None)


def read_trace(file: Path) -> Trace:
    """Read a file that `torch.profiler` wrote, compressed or not.

    Raises:
        ValueError: if it is no chrome trace.
    """
    opened = gzip.open(file, "rt") if file.suffix == ".gz" else file.open()
    with opened as text:
        content = json.load(text)
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise ValueError(f"{file} is no chrome trace: it has no traceEvents")
    return make_trace(events)


def make_trace(events: Iterable[Event]) -> Trace:
    """Make a trace from its events."""
    whole = [event for event in events if event.get("ph") == "X" and "dur" in event]
    start = min((float(event["ts"]) for event in whole), default=0.0)
    calls = [event for event in whole if event.get("cat") == "cuda_runtime"]
    launches = [*calls, *(event for event in whole if event.get("cat") == "cuda_driver")]
    issued = {event["args"]["correlation"]: float(event["ts"]) - start for event in launches if "args" in event}
    trace = Trace()
    for event in whole:
        _add_device_event(trace, event, start, issued)
    trace.waits = sorted(_host_waits(calls, whole, start), key=lambda wait: wait.span)
    trace.end = max((float(event["ts"]) + float(event["dur"]) - start for event in whole), default=0.0)
    return trace


def _add_device_event(trace: Trace, event: Event, start: float, issued: dict[Any, float]) -> None:
    kind, name, args = event.get("cat"), event.get("name", ""), event.get("args", {})
    span = _span(event, start)
    is_out, is_in = "DtoH" in name, "HtoD" in name
    at = issued.get(args.get("correlation"), span.begin)
    if kind == "gpu_memcpy" and (is_out or is_in):
        trace.copies.append(Copy(span, int(args.get("bytes", 0)), is_out, at))
    elif kind in ("kernel", "gpu_memcpy", "gpu_memset"):
        trace.kernels[int(args.get("stream", 0))].append(Kernel(span, name, at))


def _span(event: Event, start: float) -> Span:
    begin = float(event["ts"]) - start
    return Span(begin, begin + float(event["dur"]))


def _host_waits(calls: Sequence[Event], whole: Sequence[Event], start: float) -> list[HostWait]:
    reads = [event for event in whole if event.get("cat") == "cpu_op" and event["name"] in _READS]
    found = []
    for event in calls:
        if event["name"] in _SYNCHRONIZE:
            found.append(HostWait(_name_of(event, reads), _span(event, start)))
    return found + _spins([event for event in calls if event["name"] == _QUERY], start)


def _name_of(call: Event, reads: Sequence[Event]) -> str:
    """Return the name with the operation that made the call: the outermost one that reads on the host."""
    around = [
        read
        for read in reads
        if read.get("tid") == call.get("tid")
        and read["ts"] <= call["ts"]
        and call["ts"] + call["dur"] <= read["ts"] + read["dur"]
    ]
    outermost = max(around, key=lambda read: float(read["dur"]), default=None)
    return f"{outermost['name']}, {call['name']}" if outermost else str(call["name"])


def _spins(queries: Sequence[Event], start: float) -> list[HostWait]:
    """Find queries that follow each other closely, of which the engine's small host reads are made."""
    threads: dict[Any, list[Span]] = defaultdict(list)
    for query in queries:
        threads[query.get("tid")].append(_span(query, start))
    runs = [run for spans in threads.values() for run in _runs(sorted(spans)) if len(run) > 1]
    return [HostWait(f"spin of {_QUERY}", Span(run[0].begin, run[-1].end)) for run in runs]


def _runs(spans: Sequence[Span]) -> list[list[Span]]:
    runs: list[list[Span]] = []
    for span in spans:
        if runs and span.begin - runs[-1][-1].end <= _SPIN_GAP_US:
            runs[-1].append(span)
        else:
            runs.append([span])
    return runs
