# SPDX-License-Identifier: Apache-2.0
"""Kernels and the pauses in front of them, beside the same kernels in another trace. Pure functions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .spans import Span, union
from .trace import Kernel, Trace

_AHEAD_US = 20.0  # a host that is less ahead than that is late: the launch itself takes some of it
_MOMENT_US = 20.0  # a longer pause of a stream whose work is there waits for another stream

LATE = "the host was late"
STREAM = "it waited for another stream"
IN, OUT, QUIET = "beside a copy-in", "beside a copy-out", "beside no copy"
KINDS = (LATE, IN, OUT, QUIET, STREAM)
KERNEL = "kernel"  # in front of the kind, where a row is of the kernels themselves
KERNEL_KINDS = tuple(f"{KERNEL} {kind}" for kind in (IN, OUT, QUIET))


class Pause(NamedTuple):
    """Of the stream that computes, in front of one kernel."""

    span: Span
    ahead_us: float
    """How long before the pause the host had begun to launch the kernel behind it."""


def compare(reference: Trace, other: Trace) -> list[dict[str, Any]]:
    """Compute by how much the pauses of `other` are longer than those of `reference`, by cause.

    And what its kernels are longer by, which slower memory or a slower clock of the GPU does to them.

    Only kernels of the stream that computes most are looked at. What `other` launches besides counts for the pause in
    front of the next kernel that both have.
    """
    before = _kernels(reference)
    after = _counterparts(before, _kernels(other))
    copies = {
        is_out: union(c.span for c in other.copies if c.is_out is is_out and c.is_of_activations)
        for is_out in (True, False)
    }
    found = [
        (_kind(pause, longer, copies), pause.span.length, longer.span.length)
        for pause, longer in zip(_pauses(before), _pauses(after), strict=True)
    ]
    for kernel, same in zip(before, after, strict=True):
        found.append((f"{KERNEL} {_beside(same.span, copies)}", kernel.span.length, same.span.length))
    rows = []
    for kind in (*KINDS, *KERNEL_KINDS):
        own = [one for one in found if one[0] == kind]
        sums = {"reference_us": sum(first for _, first, _ in own), "total_us": sum(last for _, _, last in own)}
        rows.append({"pause": kind, "count": len(own), **sums})
    return rows


def _kernels(trace: Trace) -> list[Kernel]:
    stream = trace.compute_stream
    return [] if stream is None else sorted(trace.kernels[stream], key=lambda kernel: kernel.span)


def _counterparts(before: Sequence[Kernel], after: Iterable[Kernel]) -> list[Kernel]:
    found: list[Kernel] = []
    for kernel in after:
        if len(found) < len(before) and kernel.name == before[len(found)].name:
            found.append(kernel)
    if len(found) < len(before):
        raise ValueError(
            f"the traces are of different models: kernel {len(found) + 1} of {len(before)}, "
            f"{before[len(found)].name[:80]}, is in the first one only"
        )
    return found


def _pauses(kernels: Sequence[Kernel]) -> list[Pause]:
    return [
        Pause(Span(one.span.end, max(one.span.end, two.span.begin)), one.span.end - two.issued)
        for one, two in zip(kernels, kernels[1:], strict=False)
    ]


def _kind(one: Pause, two: Pause, copies: Mapping[bool, Sequence[Span]]) -> str:
    if min(one.ahead_us, two.ahead_us) < _AHEAD_US:
        return LATE
    return STREAM if one.span.length > _MOMENT_US else _beside(two.span, copies)


def _beside(span: Span, copies: Mapping[bool, Sequence[Span]]) -> str:
    middle = (span.begin + span.end) / 2
    return IN if _covers(copies[False], middle) else OUT if _covers(copies[True], middle) else QUIET


def _covers(spans: Sequence[Span], moment: float) -> bool:
    index = bisect_right(spans, moment, key=lambda span: span.begin) - 1
    return index >= 0 and spans[index].end > moment
