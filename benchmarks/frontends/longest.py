# SPDX-License-Identifier: Apache-2.0
"""The longest sequence that trains: a guess from two short ones, and a search between what did and what did not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Trial(NamedTuple):
    """A length that trained, and what it took."""

    seq: int
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    host_bytes: int = 0
    """Pinned, at most."""
    seconds: float = 0.0
    """Of its step."""


@dataclass
class Search:
    """Looks for the longest multiple of `unit` that trains: says what to try next, and is told how it went.

    Steps away from the first guess, twice as far each time, until one length trained and one did not; then halves the
    distance. A guess that is right costs two trials: it and the next longer one.
    """

    first: int
    """The guess."""
    unit: int
    upper: int
    """Nothing longer is tried."""
    known: Mapping[int, bool] = field(default_factory=dict)
    """Whether lengths train that were tried earlier."""
    trained: int = 0
    failed: int | None = None
    """The shortest length that did not train."""
    _has_stepped: bool = False

    def __post_init__(self) -> None:
        for seq, trains in sorted(self.known.items()):
            self._take(seq, trains)
        self._stride = max(1, self.first // self.unit // 64)
        self._guess = min(max(self._low + 1, self.first // self.unit), self._high - 1)

    @property
    def is_final(self) -> bool:
        """Return whether the two are one unit apart, or the upper bound was reached."""
        return self._high - self._low <= 1

    @property
    def next_seq(self) -> int:
        """Return the length to try next, if the search is not over."""
        return self._guess * self.unit

    def note(self, trains: bool) -> None:
        """Note the result of `next_seq`."""
        self._take(self.next_seq, trains)
        self._has_stepped |= trains
        if self._has_stepped and self.failed is not None:
            self._guess = (self._low + self._high) // 2
            return
        # A guess that failed was too high by a little, and what trained before it is short.
        guess = self._low + self._stride if self._has_stepped else self._high - self._stride
        self._guess = min(max(guess, self._low + 1), self._high - 1)
        self._stride *= 2

    @property
    def _low(self) -> int:
        return self.trained // self.unit

    @property
    def _high(self) -> int:
        return max(1, self.upper // self.unit) + 1 if self.failed is None else self.failed // self.unit

    def _take(self, seq: int, trains: bool) -> None:
        if trains:
            self.trained = max(self.trained, seq)
        elif self.failed is None or seq < self.failed:
            self.failed = seq


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a contender may take."""

    device_bytes: int
    host_bytes: int
    upper: int
    """Tokens; longer is not possible."""
    stays_on_device: bool
    """Whether what exceeds the host's share stays on the device; else the contender ends there."""


def predict(one: Trial, other: Trial, limits: Limits) -> int:
    """Predict the longest sequence from two short trials, by the memory of the device and by that of the host.

    By what was allocated: what the allocator's cache holds beside it, it gives up when memory is short. That is a
    little too long rather than too short, and a length that fails takes a fraction of the time of one that trains.
    """

    def reaches(first: int, second: int, limit: int) -> int:
        """Return the length at which the line through two amounts is at a limit."""
        per_token = (second - first) / (other.seq - one.seq)
        return limits.upper if per_token <= 0 else max(0, int((limit - first) / per_token) + one.seq)

    by_device = min(limits.upper, reaches(one.peak_allocated_bytes, other.peak_allocated_bytes, limits.device_bytes))
    by_host = reaches(one.host_bytes, other.host_bytes, limits.host_bytes)
    if by_host >= by_device or not limits.stays_on_device:
        return min(by_device, by_host)
    first, second = (trial.peak_allocated_bytes + trial.host_bytes for trial in (one, other))
    return reaches(first, second, limits.device_bytes + limits.host_bytes)


def predict_seconds(one: Trial, other: Trial, seq: int, flops: Callable[[int], float]) -> float:
    """Predict the time of a trial of `seq`, rather too much than too little.

    By the line through two short trials, or the longer one alone where the first had more to set up. How many more a
    token takes in a long sequence is arithmetic: in short ones attention is too little of the time to be told.
    """
    per_token = (other.seconds - one.seconds) / (other.seq - one.seq)
    return max(per_token * other.seq, other.seconds) * flops(seq) / flops(other.seq)
