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
_ACTIVATION_BYTES = 1 << 20
_SPIN_GAP_US = 20.0  # between two queries of a spin there is little Python


class Copy(NamedTuple):
    """A copy between device and host, on the device."""

    span: Span
    nbytes: int
    is_out: bool
    issued: float
    """When the host called for it."""

    @property
    def is_of_activations(self) -> bool:
        """Tell it from a small read."""
        return self.nbytes >= _ACTIVATION_BYTES


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
    """Read a file that `torch.profiler` wrote, compressed or not."""
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as text:
        content = json.load(text)
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise ValueError(f"{file} is no chrome trace: it has no traceEvents")
    return make_trace(events)


def make_trace(events: Iterable[Event]) -> Trace:
    """Make a trace from its events."""
    whole = [event for event in events if event.get("ph") == "X" and "dur" in event]
    start = min((float(event["ts"]) for event in whole), default=0.0)
    by_kind: defaultdict[str | None, list[tuple[Event, Span]]] = defaultdict(list)
    for event in whole:
        begin = float(event["ts"]) - start
        by_kind[event.get("cat")].append((event, Span(begin, begin + float(event["dur"]))))
    launches = by_kind["cuda_runtime"] + by_kind["cuda_driver"]
    issued = {event["args"]["correlation"]: span.begin for event, span in launches if "args" in event}
    trace = Trace()
    for event, span in by_kind["kernel"] + by_kind["gpu_memcpy"] + by_kind["gpu_memset"]:
        name, args = event.get("name", ""), event.get("args", {})
        at = issued.get(args.get("correlation"), span.begin)
        if event["cat"] == "gpu_memcpy" and ("DtoH" in name or "HtoD" in name):
            trace.copies.append(Copy(span, int(args.get("bytes", 0)), "DtoH" in name, at))
        else:
            trace.kernels[int(args.get("stream", 0))].append(Kernel(span, name, at))
    reads = [(event, span) for event, span in by_kind["cpu_op"] if event["name"] in _READS]
    calls = by_kind["cuda_runtime"]
    waits = [HostWait(_name_of(event, span, reads), span) for event, span in calls if event["name"] in _SYNCHRONIZE]
    trace.waits = sorted(waits + _spins(calls), key=lambda wait: wait.span)
    trace.end = max((span.end for found in by_kind.values() for _, span in found), default=0.0)
    return trace


def _name_of(call: Event, span: Span, reads: Sequence[tuple[Event, Span]]) -> str:
    """Return the name with the operation that made the call: the outermost one that reads on the host."""
    around = [
        (read_span.length, read["name"])
        for read, read_span in reads
        if read.get("tid") == call.get("tid") and read_span.begin <= span.begin and span.end <= read_span.end
    ]
    return f"{max(around)[1]}, {call['name']}" if around else str(call["name"])


def _spins(calls: Sequence[tuple[Event, Span]]) -> list[HostWait]:
    """Find queries that follow each other closely, of which the engine's small host reads are made."""
    threads: defaultdict[Any, list[list[Span]]] = defaultdict(list)
    for query, span in sorted((call for call in calls if call[0]["name"] == _QUERY), key=lambda call: call[1]):
        runs = threads[query.get("tid")]
        if runs and span.begin - runs[-1][-1].end <= _SPIN_GAP_US:
            runs[-1].append(span)
        else:
            runs.append([span])
    found = [run for runs in threads.values() for run in runs if len(run) > 1]
    return [HostWait(f"spin of {_QUERY}", Span(run[0].begin, run[-1].end)) for run in found]
