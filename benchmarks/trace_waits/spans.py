# SPDX-License-Identifier: Apache-2.0
"""Sets of time, as sorted spans that do not touch. Pure functions; times in microseconds."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """From `begin` until `end`."""

    begin: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.begin


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the time in which at least one of the spans is."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.begin <= found[-1].end:
            found[-1] = Span(found[-1].begin, max(found[-1].end, span.end))
        else:
            found.append(span)
    return found


def within(spans: Sequence[Span], bound: Span) -> list[Span]:
    """Return the parts of the spans inside `bound`, sorted and without overlaps."""
    first = bisect_right(spans, bound.begin, key=lambda span: span.end)
    last = bisect_left(spans, bound.end, lo=first, key=lambda span: span.begin)
    return [Span(max(span.begin, bound.begin), min(span.end, bound.end)) for span in spans[first:last]]


def without(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Return the time of `spans` in which none of `others` is; both sorted and without overlaps."""
    found: list[Span] = []
    for span in spans:
        begin = span.begin
        for other in others:
            if other.end <= begin or other.begin >= span.end:
                continue
            found.append(Span(begin, other.begin))
            begin = other.end
        found.append(Span(begin, span.end))
    return [span for span in found if span.length > 0]


def total(spans: Iterable[Span]) -> float:
    """Return the microseconds of spans that do not overlap."""
    return sum(span.length for span in spans)
