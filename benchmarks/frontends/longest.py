# SPDX-License-Identifier: Apache-2.0
"""The longest sequence that trains: a guess from two short ones, and a search between what did and what did not."""

from __future__ import annotations

import math
from typing import NamedTuple


class Trial(NamedTuple):
    """A length that trained, and what it took."""

    seq: int
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    host_bytes: int = 0
    """Pinned, at most."""


class Search:
    """Looks for the longest multiple of `unit` that trains, where one unit does: says what to try, is told how it went.

    Steps away from the guess, twice as far each time, until one length trained and one did not; then halves the
    distance. A guess that is right costs two trials: it and the next longer one.
    """

    def __init__(self, guess: int, unit: int) -> None:
        self.trained = unit
        self.failed: int | None = None
        """The shortest length that did not train."""
        self._unit = unit
        self._stride = max(1, guess // unit // 64) * unit
        self._has_stepped = False
        self.next_seq = self._between(guess)

    @property
    def is_final(self) -> bool:
        """Return whether no length is left between the two."""
        return self.failed is not None and self.failed - self.trained <= self._unit

    def note(self, trains: bool) -> None:
        """Note the result of `next_seq`."""
        if trains:
            self.trained, self._has_stepped = self.next_seq, True
        else:
            self.failed = self.next_seq
        if self._has_stepped and self.failed:
            self.next_seq = self._between((self.trained + self.failed) // 2)
            return
        # A guess that failed was too high by a little, and what trained before it is short.
        self.next_seq = self._between(self.next_seq + (self._stride if trains else -self._stride))
        self._stride *= 2

    def _between(self, seq: int) -> int:
        return max(seq // self._unit * self._unit, self.trained + self._unit)


def predict(one: Trial, other: Trial, device_bytes: int, host_bytes: int, stays_on_device: bool) -> int:
    """Predict the longest sequence from two short trials, by the memory of the device and by that of the host.

    By what was allocated: what the allocator's cache holds beside it, it gives up when memory is short. That is a
    little too long rather than too short, and a length that fails takes a fraction of the time of one that trains.
    What exceeds the host's share `stays_on_device`, or ends the contender.
    """

    def reaches(first: int, second: int, limit: int) -> float:
        """Return the length at which the line through two amounts is at a limit."""
        per_token = (second - first) / (other.seq - one.seq)
        return max(0, (limit - first) / per_token + one.seq) if per_token > 0 else math.inf

    by_device = reaches(one.peak_allocated_bytes, other.peak_allocated_bytes, device_bytes)
    by_host = reaches(one.host_bytes, other.host_bytes, host_bytes)
    if by_host < by_device and stays_on_device:
        first, second = (trial.peak_allocated_bytes + trial.host_bytes for trial in (one, other))
        return int(reaches(first, second, device_bytes + host_bytes))
    return int(min(by_device, by_host))
