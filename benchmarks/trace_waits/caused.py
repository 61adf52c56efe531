# SPDX-License-Identifier: Apache-2.0
"""Which host waits copies of activations caused. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .spans import Span, total, union, within, without
from .trace import Copy, HostWait, Trace

_NEXT_IN_QUEUE_US = 30.0  # a copy engine takes up what is queued within so many
_BETWEEN_KERNELS_US = 30.0  # pauses of a busy stream, none of them a wait; in a long one there are thousands


class Judged(NamedTuple):
    """A host wait, and what of it a copy is to blame for."""

    wait: HostWait
    copying_us: float
    """In which activations were being copied."""
    caused_us: float
    """In which they were, and the GPU did nothing else for more than a moment; or a small copy, which the host waited
    for, was queued behind them. An upper bound: what the small copy needed may have been computed meanwhile."""


def judge(trace: Trace) -> list[Judged]:
    """Judge all waits of a step."""
    large = [copy for copy in trace.copies if copy.is_of_activations]
    small = [copy for copy in trace.copies if not copy.is_of_activations]
    copying = union(copy.span for copy in large)
    others = [copy.span for copy in small] + [kernel.span for kernels in trace.kernels.values() for kernel in kernels]
    busy = union(others)
    queues = {is_out: _queues([copy for copy in large if copy.is_out is is_out]) for is_out in (True, False)}
    found = []
    for wait in trace.waits:
        during = within(copying, wait.span)
        pauses = without(during, within(busy, wait.span)) if during else []
        idle = total(pause for pause in pauses if pause.length > _BETWEEN_KERNELS_US)
        queued = max((_queued(copy, wait.span, queues[copy.is_out]) for copy in small), default=0.0)
        found.append(Judged(wait, total(during), max(idle, queued)))
    return found


def _queues(copies: Sequence[Copy]) -> list[Span]:
    """Find copies of one way that followed each other without a pause: what is queued behind one waits for all."""
    padded = union(Span(copy.span.begin, copy.span.end + _NEXT_IN_QUEUE_US) for copy in copies)
    return [Span(span.begin, span.end - _NEXT_IN_QUEUE_US) for span in padded]


def _queued(copy: Copy, wait: Span, queues: Sequence[Span]) -> float:
    """Return how long of a wait this small copy was queued behind large ones."""
    if not wait.begin <= copy.span.begin <= wait.end:
        return 0.0
    ahead = [q for q in queues if q.begin < copy.span.begin <= q.end + _NEXT_IN_QUEUE_US]
    begin = max(wait.begin, copy.issued, *(q.begin for q in ahead)) if ahead else copy.span.begin
    return max(0.0, copy.span.begin - begin)


def summarize(label: str, judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """Make one record for each kind of wait of a trace, the longest first, and one for all of them."""
    names = dict.fromkeys(one.wait.what for one in judged)
    rows = [_row(label, name, [one for one in judged if one.wait.what == name]) for name in names]
    return [*sorted(rows, key=lambda row: -row["longest_us"]), _row(label, "all", judged)]


def _row(label: str, what: str, own: Sequence[Judged]) -> dict[str, Any]:
    lengths = [one.wait.span.length for one in own]
    return {
        "label": label,
        "what": what,
        "count": len(own),
        "longest_us": max(lengths, default=0.0),
        "total_us": sum(lengths),
        "copying_us": sum(one.copying_us for one in own),
        "longest_caused_us": max((one.caused_us for one in own), default=0.0),
        "total_caused_us": sum(one.caused_us for one in own),
    }
