"""The longest sequence that trains: a guess from two short ones, and a search between what did and what did not.

Pure functions: what a trial is, `LongestBench` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Whether one length trained, and what it took."""

    seq: int
    trains: bool
    reason: str | None
    is_final: bool
    """False where its time was over: that says nothing of the length."""
    peak_reserved_bytes: int = 0
    host_bytes: int = 0
    """Pinned, at its end."""
    seconds: float = 0.0
    """Of its step."""


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


def search(
    trial: Callable[[int], Trial],
    first: int,
    unit: int,
    upper: int,
    has_time: Callable[[int], bool] = lambda seq: True,
    known: Sequence[Trial] = (),
) -> Longest:
    """The longest multiple of `unit` that trains.

    Steps away from the first guess, twice as far each time, until one length trained and one did not; then halves the
    distance. A guess that is right costs two trials: it and the next longer one.

    Args:
        trial: tries one length.
        first: the guess.
        unit: lengths are multiples of it.
        upper: nothing longer is tried.
        has_time: asked before each trial, whether it may begin.
        known: trials of short lengths that were made already.
    """
    top = max(1, upper // unit)
    best = max((one for one in known if one.trains), key=lambda one: one.seq, default=None)
    worst = next((one for one in known if not one.trains), None)
    low, high, num_trials = best.seq // unit if best else 0, top + 1, len(known)
    if worst is not None and worst.is_final:
        high = worst.seq // unit
    guess, stride = min(max(low + 1, first // unit), high - 1), max(1, first // unit // 64)
    while high - low > 1 and (worst is None or worst.is_final) and has_time(guess * unit):
        found = trial(guess * unit)
        num_trials += 1
        if found.trains:
            best, low = found, guess
        else:
            worst = found
            high = guess if found.is_final else high
        guess, stride = _next_guess(low, high, top, stride, has_stepped=best is not None and best not in known)
    return Longest(
        trained=low * unit,
        failed=high * unit if high <= top else None,
        reason=worst.reason if worst else None,
        num_trials=num_trials,
        is_final=high - low <= 1,
        peak_reserved_bytes=best.peak_reserved_bytes if best else 0,
        host_bytes=best.host_bytes if best else 0,
    )


def _next_guess(low: int, high: int, top: int, stride: int, has_stepped: bool) -> tuple[int, int]:
    """The next one, and how far the one after it is from there.

    Args:
        has_stepped: whether `low` is one of this search: then what lies between is halved. Else `low` is of short
            lengths far below, and a guess that failed was too high by a little.
    """
    if has_stepped and high <= top:
        return (low + high) // 2, stride
    guess = low + stride if has_stepped else high - stride
    return min(max(guess, low + 1), top), 2 * stride


@dataclass(frozen=True)
class Line:
    """Bytes that grow with the length: so many without any token, and so many for each."""

    at_zero: float
    per_token: float

    def reaches(self, nbytes: float, otherwise: int) -> int:
        """The length at which they are `nbytes`; `otherwise` where they do not grow."""
        return otherwise if self.per_token <= 0 else max(0, int((nbytes - self.at_zero) / self.per_token))


def line_through(one: tuple[int, float], other: tuple[int, float]) -> Line:
    """Through two points of a length and its bytes."""
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
    """The longest that two short trials let expect, by the memory of the device and by that of the host."""
    device = line_through((one.seq, one.peak_reserved_bytes), (other.seq, other.peak_reserved_bytes))
    host = line_through((one.seq, one.host_bytes), (other.seq, other.host_bytes))
    by_device = min(limits.upper, device.reaches(limits.device_bytes, limits.upper))
    by_host = host.reaches(limits.host_bytes, limits.upper)
    if by_host >= by_device:
        return by_device
    if not limits.stays_on_device:
        return by_host
    both = Line(device.at_zero + host.at_zero - limits.host_bytes, device.per_token + host.per_token)
    return both.reaches(limits.device_bytes, limits.upper)


def predict_seconds(one: Trial, other: Trial, seq: int) -> float:
    """What a trial of `seq` takes: a linear and a quadratic part (attention), through two trials."""
    rates = [trial.seconds / trial.seq for trial in (one, other)]
    growth = max(0.0, (rates[1] - rates[0]) / (other.seq - one.seq))  # the first one may have had more to set up
    return (rates[1] + growth * (seq - other.seq)) * seq


def share_of(seconds: float, own_weight: float, other_weights: Sequence[float]) -> float:
    """What one contender may take of the time that is left for it and those after it."""
    return max(0.0, seconds) * own_weight / (own_weight + sum(other_weights))
