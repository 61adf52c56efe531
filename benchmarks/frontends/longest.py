# SPDX-License-Identifier: Apache-2.0
"""The longest sequence that trains: a guess from two short ones, and a search between what did and what did not."""

from __future__ import annotations

from collections.abc import Callable
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


class Search:
    """Looks for the longest multiple of `unit` that trains, where one unit does: says what to try, is told how it went.

    Steps away from the guess, twice as far each time, until one length trained and one did not; then halves the
    distance. A guess that is right costs two trials: it and the next longer one. Nothing above `upper` is tried.
    """

    def __init__(self, guess: int, unit: int, upper: int) -> None:
        self.trained = unit
        self.failed: int | None = None
        """The shortest length that did not train."""
        self._unit, self._end = unit, (max(1, upper // unit) + 1) * unit
        self._stride = max(1, guess // unit // 64) * unit
        self._has_stepped = False
        self.next_seq = self._between(guess)

    @property
    def is_final(self) -> bool:
        """Return whether no length is left between the two, or to the upper bound."""
        return self._end - self.trained <= self._unit

    def note(self, trains: bool) -> None:
        """Note the result of `next_seq`."""
        if trains:
            self.trained, self._has_stepped = self.next_seq, True
        else:
            self._end = self.failed = self.next_seq
        if self._has_stepped and self.failed:
            self.next_seq = self._between((self.trained + self._end) // 2)
            return
        # A guess that failed was too high by a little, and what trained before it is short.
        self.next_seq = self._between(self.trained + self._stride if self._has_stepped else self._end - self._stride)
        self._stride *= 2

    def _between(self, seq: int) -> int:
        return min(max(seq // self._unit * self._unit, self.trained + self._unit), self._end - self._unit)


def predict(one: Trial, other: Trial, device_bytes: int, host_bytes: int, upper: int, stays_on_device: bool) -> int:
    """Predict the longest sequence from two short trials, by the memory of the device and by that of the host.

    By what was allocated: what the allocator's cache holds beside it, it gives up when memory is short. That is a
    little too long rather than too short, and a length that fails takes a fraction of the time of one that trains.
    What exceeds the host's share `stays_on_device`, or ends the contender.
    """

    def reaches(first: int, second: int, limit: int) -> int:
        """Return the length at which the line through two amounts is at a limit."""
        per_token = (second - first) / (other.seq - one.seq)
        return upper if per_token <= 0 else max(0, int((limit - first) / per_token) + one.seq)

    by_device = min(upper, reaches(one.peak_allocated_bytes, other.peak_allocated_bytes, device_bytes))
    by_host = reaches(one.host_bytes, other.host_bytes, host_bytes)
    if by_host >= by_device or not stays_on_device:
        return min(by_device, by_host)
    first, second = (trial.peak_allocated_bytes + trial.host_bytes for trial in (one, other))
    return reaches(first, second, device_bytes + host_bytes)


def predict_seconds(one: Trial, other: Trial, seq: int, flops: Callable[[int], float]) -> float:
    """Predict the time of a trial of `seq`, rather too much than too little.

    By the line through two short trials, or the longer one alone where the first had more to set up. How many more a
    token takes in a long sequence is arithmetic: in short ones attention is too little of the time to be told.
    """
    per_token = (other.seconds - one.seconds) / (other.seq - one.seq)
    return max(per_token * other.seq, other.seconds) * flops(seq) / flops(other.seq)
