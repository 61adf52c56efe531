# SPDX-License-Identifier: Apache-2.0
"""Draws what streams and host did around the longest wait that a copy caused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import picture

from .caused import Judged
from .spans import Span, union, within
from .trace import Trace

_LANES = ("host waits", "copy-in", "copy-out", "other kernels", "compute")
_COLORS = {"host waits": "tab:gray", "copy-in": "tab:blue", "copy-out": "tab:orange", "other kernels": "tab:olive"}


def draw(traces: Mapping[str, tuple[Trace, Sequence[Judged]]], file: Path, span_us: float, noticed_us: float) -> None:
    """Draw a panel of `span_us` for each trace; waits of which copies caused more than `noticed_us` are red."""
    with picture(file, len(traces), 1, figsize=(12, 0.8 + 1.9 * len(traces)), squeeze=False) as (_, panels):
        for axes, (label, (trace, judged)) in zip(panels[:, 0], traces.items(), strict=True):
            bound = window(trace, judged, span_us)
            for height, name in enumerate(_LANES):
                _bars(axes, _lane(trace, name), bound, height, _COLORS.get(name, "tab:green"))
            red = [one.wait.span for one in judged if one.caused_us > noticed_us]
            _bars(axes, red, bound, 0, "tab:red")
            longest = max((one.caused_us for one in judged), default=0.0)
            axes.set_title(f"{label}: the longest wait that a copy caused takes {longest / 1e3:.3f} ms", loc="left")
            axes.set(yticks=range(len(_LANES)), yticklabels=_LANES, xlim=(0, bound.length / 1e3))
        panels[-1, 0].set_xlabel(f"ms; host waits of which a copy caused more than {noticed_us / 1e3:g} ms are red")


def window(trace: Trace, judged: Sequence[Judged], span_us: float) -> Span:
    """Choose the time to draw: around the end of the longest wait that a copy caused, else of the longest of all."""
    worst = max(judged, key=lambda one: (one.caused_us, one.wait.span.length), default=None)
    middle = worst.wait.span.end if worst else (trace.begin + trace.end) / 2
    begin = max(trace.begin, min(middle - span_us / 2, trace.end - span_us))
    return Span(begin, begin + span_us)


def _lane(trace: Trace, name: str) -> list[Span]:
    if name == "host waits":
        return [wait.span for wait in trace.waits]
    if name in ("copy-in", "copy-out"):
        is_out = name == "copy-out"
        return [c.span for c in trace.copies if c.is_out is is_out and c.is_of_activations]
    main = trace.compute_stream
    streams = [stream for stream in trace.kernels if (stream == main) == (name == "compute")]
    return [kernel.span for stream in streams for kernel in trace.kernels[stream]]


def _bars(axes: Any, spans: Sequence[Span], bound: Span, height: int, color: str) -> None:
    parts = within(union(spans), bound)
    ranges = [((span.begin - bound.begin) / 1e3, span.length / 1e3) for span in parts]
    axes.broken_barh(ranges, (height - 0.35, 0.7), facecolors=color)
