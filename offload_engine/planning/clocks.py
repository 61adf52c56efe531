# SPDX-License-Identifier: Apache-2.0
"""Keeps the clocks of one rank: its compute stream, its two copy streams, and a host that runs ahead of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Link:
    """How fast a device copies, and how far ahead of it the host runs.

    Raises:
        ValueError: for a bandwidth that is not positive.
    """

    out_gbps: float = 50.0
    """Bandwidth of copy-outs, in 10^9 bytes a second."""
    in_gbps: float = 48.0
    """Bandwidth of copy-ins, at the same time."""
    host_share: float = 0.6
    """Host time to launch a kernel, as a share of the kernel's own time."""

    def __post_init__(self) -> None:
        if self.out_gbps <= 0 or self.in_gbps <= 0:
            raise ValueError(f"bandwidths must be positive, got {self.out_gbps} out and {self.in_gbps} in")


class Span(NamedTuple):
    """An interval on a track of the timeline; times in ms from the start of the step."""

    track: str
    """"compute", "wait" (of compute, for a copy), "copy-out" or "copy-in"."""
    start: float
    end: float
    label: str


class Clocks:
    """Keeps times in ms from the start of the step; work is issued in the order of the host.

    Args:
        link: link of the copies.
        is_drawn: whether spans are recorded.
    """

    def __init__(self, link: Link, is_drawn: bool = True) -> None:
        self.is_drawn: bool = is_drawn
        self.compute: float = 0.0
        self.host: float = 0.0
        self.stalled: dict[str, float] = {}
        """How long compute has waited for copies, by the label of the wait."""
        self.stalled_ms: float = 0.0
        """The sum of these."""
        self.spans: list[Span] = []
        self._link = link
        self._copy_out = self._copy_in = 0.0

    def run(self, milliseconds: float, label: str = "") -> None:
        """Launch kernels."""
        if milliseconds:
            start = max(self.compute, self.host)
            self.compute = start + milliseconds
            self.host += self._link.host_share * milliseconds
            self._draw("compute", start, self.compute, label)

    def wait(self, until: float, label: str) -> None:
        """Make compute wait for a copy that completes at `until`."""
        if until > self.compute:
            self.stalled[label] = self.stalled.get(label, 0.0) + until - self.compute
            self.stalled_ms += until - self.compute
            self._draw("wait", self.compute, until, label)
            self.compute = until

    def receive(self, at: float) -> None:
        """Make compute wait for data that another rank sent at `at`."""
        self.compute = max(self.compute, at)

    def copy_out(self, nbytes: int, after: float, label: str) -> float:
        """Issue a copy-out that waits until `after`; returns when it completes."""
        start = max(self._copy_out, after, self.host)
        self._copy_out = start + nbytes / self._link.out_gbps / 1e6
        self._draw("copy-out", start, self._copy_out, label)
        return self._copy_out

    def copy_in(self, nbytes: int, label: str) -> float:
        """Issue a copy-in after the compute work issued so far; returns when it completes."""
        start = max(self._copy_in, self.compute, self.host)
        self._copy_in = start + nbytes / self._link.in_gbps / 1e6
        self._draw("copy-in", start, self._copy_in, label)
        return self._copy_in

    def is_over(self, at: float) -> bool:
        """Return whether the host would now find a copy complete that completes at `at`."""
        return self.host >= at

    def _draw(self, track: str, start: float, end: float, label: str) -> None:
        if self.is_drawn:
            self.spans.append(Span(track, start, end, label))
