"""The longest sequence that trains: a guess from two short ones, and a search between what did and what did not.

Pure functions and plain state: what a trial is, `LongestBench` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Whether one length trained, and what it took."""

    seq: int
    trains: bool
    reason: str | None
    is_final: bool
    """False where its time was over, or others had taken its memory: that says nothing of the length."""
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    host_bytes: int = 0
    """Pinned, at most."""
    seconds: float = 0.0
    """Of its step."""


def known_trials(records: Iterable[Mapping[str, Any]]) -> dict[str, list[Trial]]:
    """Find the trials of earlier runs, by contender: those among their records that say something of a length."""
    names = [field.name for field in fields(Trial)]
    found: dict[str, list[Trial]] = {}
    for record in records:
        if record["kind"] == "trial" and record["is_final"]:
            found.setdefault(record["label"], []).append(Trial(**{name: record[name] for name in names}))
    return found


@dataclass(frozen=True, kw_only=True)
class Longest:
    """What a search found."""

    trained: int
    failed: int | None
    """The shortest length that did not train, if any was seen."""
    reason: str | None
    num_trials: int
    is_final: bool
    """Whether the two are one unit apart, or the upper bound was reached."""
    peak_reserved_bytes: int
    host_bytes: int


class Search:
    """Looks for the longest multiple of `unit` that trains: says what to try next, and is told how it went.

    Steps away from the first guess, twice as far each time, until one length trained and one did not; then halves the
    distance. A guess that is right costs two trials: it and the next longer one.

    Args:
        first: the guess.
        unit: lengths are multiples of it.
        upper: nothing longer is tried.
        known: trials that were made already: of short lengths, or of an earlier search.
    """

    def __init__(self, first: int, unit: int, upper: int, known: Sequence[Trial] = ()) -> None:
        self._unit = unit
        self._top = max(1, upper // unit)
        self._low, self._high = 0, self._top + 1  # in units: this trained, this did not
        self._best: Trial | None = None
        self._failure: str | None = None  # of what did not train
        self._hindrance: str | None = None  # of the last trial, if it was not final
        self._num_trials = 0
        for one in known:
            self._take(one)
        self._has_stepped = False  # whether `low` is one of this search; else it is of short lengths far below
        self._stride = max(1, first // unit // 64)
        self._guess = min(max(self._low + 1, first // unit), self._high - 1)

    @property
    def is_final(self) -> bool:
        return self._high - self._low <= 1

    @property
    def next_seq(self) -> int:
        """Return the length to try next, if the search is not over."""
        return self._guess * self._unit

    def note(self, trial: Trial) -> None:
        """Note the result of `next_seq`. A trial that is not final leaves everything as it was."""
        self._take(trial)
        self._has_stepped |= trial.trains
        if trial.is_final and not self.is_final:
            self._step()

    def found(self) -> Longest:
        """Return the results so far."""
        best = self._best
        return Longest(
            trained=self._low * self._unit,
            failed=self._high * self._unit if self._high <= self._top else None,
            reason=self._failure if self.is_final else self._hindrance or self._failure,
            num_trials=self._num_trials,
            is_final=self.is_final,
            peak_reserved_bytes=best.peak_reserved_bytes if best else 0,
            host_bytes=best.host_bytes if best else 0,
        )

    def _take(self, trial: Trial) -> None:
        self._num_trials += 1
        length = trial.seq // self._unit
        self._hindrance = None if trial.is_final else trial.reason
        if not trial.trains:
            if trial.is_final and length < self._high:
                self._high, self._failure = length, trial.reason
        elif length > self._low:
            self._best, self._low = trial, length

    def _step(self) -> None:
        if self._has_stepped and self._high <= self._top:
            self._guess = (self._low + self._high) // 2
            return
        # A guess that failed was too high by a little, and what trained before it is short.
        guess = self._low + self._stride if self._has_stepped else self._high - self._stride
        self._guess = min(max(guess, self._low + 1), self._top)
        self._stride *= 2


@dataclass(frozen=True)
class Line:
    """What grows with the length: so much without any token, and so much for each."""

    at_zero: float
    per_token: float

    def reaches(self, amount: float, otherwise: int) -> int:
        """Return the length at which the line is at `amount`; `otherwise` where it does not grow."""
        return otherwise if self.per_token <= 0 else max(0, int((amount - self.at_zero) / self.per_token))


def line_through(one: tuple[int, float], other: tuple[int, float]) -> Line:
    """Return the line through two points of length and time or memory."""
    slope = (other[1] - one[1]) / (other[0] - one[0])
    return Line(one[1] - slope * one[0], slope)


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
    device = line_through((one.seq, one.peak_allocated_bytes), (other.seq, other.peak_allocated_bytes))
    host = line_through((one.seq, one.host_bytes), (other.seq, other.host_bytes))
    by_device = min(limits.upper, device.reaches(limits.device_bytes, limits.upper))
    by_host = host.reaches(limits.host_bytes, limits.upper)
    if by_host >= by_device:
        return by_device
    if not limits.stays_on_device:
        return by_host
    both = Line(device.at_zero + host.at_zero - limits.host_bytes, device.per_token + host.per_token)
    return both.reaches(limits.device_bytes, limits.upper)


def predict_seconds(one: Trial, other: Trial, seq: int, flops: Callable[[int], float]) -> float:
    """Predict the time of a trial of `seq`, rather too much than too little.

    Two short trials tell the seconds of a token: those of their line, or of the longer one alone where the first had
    more to set up. How many more a token takes in a long sequence is arithmetic: in such short ones attention is too
    little of the time to be told from noise.

    Args:
        one: a short trial.
        other: a longer one.
        seq: tokens.
        flops: of a sequence of so many tokens, to any scale.
    """
    line = line_through((one.seq, one.seconds), (other.seq, other.seconds))
    seconds = max(line.per_token * other.seq, other.seconds)
    return seconds * flops(seq) / flops(other.seq)
