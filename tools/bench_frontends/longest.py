"""The longest sequence that trains: a search between one that did and one that did not."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from bench_gpu.measure import Gauge

from .contenders import Attach
from .turns import Bench, describe
from .watch import OutOfTime

NUM_STEPS = 2  # the second one has the memory that the first left behind, fragmented as it is


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Whether one length trained, and the peak that it reserved."""

    seq: int
    trains: bool
    reason: str | None
    is_final: bool
    """False where its time was over: that says nothing of the length."""
    peak_reserved_bytes: int = 0
    seconds: float = 0.0


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


def search(
    trial: Callable[[int], Trial], first: int, unit: int, upper: int, has_time: Callable[[], bool] = lambda: True
) -> Longest:
    """The longest multiple of `unit` that trains.

    Steps away from the first guess, twice as far each time, until one length trained and one did not; then halves the
    distance. A guess that is nearly right costs three trials.

    Args:
        trial: tries one length.
        first: the guess.
        unit: lengths are multiples of it.
        upper: nothing longer is tried.
        has_time: asked before each trial.
    """
    best: Trial | None = None
    worst: Trial | None = None
    top = max(1, upper // unit)
    guess, stride, num_trials = min(max(1, first // unit), top), max(1, first // unit // 32), 0
    low, high = 0, top + 1
    while high - low > 1 and (num_trials == 0 or has_time()):
        found = trial(guess * unit)
        num_trials += 1
        if not found.is_final:
            worst = found
            break
        if found.trains:
            best, low = found, guess
        else:
            worst, high = found, guess
        guess, stride = _next_guess(low, high, top, stride)
    return Longest(
        trained=low * unit,
        failed=high * unit if high <= top else None,
        reason=worst.reason if worst else None,
        num_trials=num_trials,
        is_final=high - low <= 1,
        peak_reserved_bytes=best.peak_reserved_bytes if best else 0,
    )


def _next_guess(low: int, high: int, top: int, stride: int) -> tuple[int, int]:
    if low and high <= top:
        return (low + high) // 2, stride
    guess = low + stride if low else high - stride
    return min(max(guess, 1), top), 2 * stride


def line_through(one: Trial, other: Trial) -> tuple[float, float]:
    """Peak reserved bytes at length zero, and bytes per token: the peak grows linearly with the length."""
    slope = (other.peak_reserved_bytes - one.peak_reserved_bytes) / (other.seq - one.seq)
    return one.peak_reserved_bytes - slope * one.seq, slope


class LongestBench:
    """Searches the longest sequence of each contender.

    Args:
        bench: of the model, whose sequence this changes.
        gauge: of memory.
        device_bytes: the memory of the device; None where nothing bounds it (the CPU).
        unit: lengths are multiples of it.
        upper: no longer than this, for a contender.
    """

    def __init__(
        self, bench: Bench, gauge: Gauge, device_bytes: int | None, unit: int, upper: Callable[[str], int]
    ) -> None:
        self._bench = bench
        self._gauge = gauge
        self._device_bytes = device_bytes
        self._unit = unit
        self._upper = upper

    def run(self, name: str, attach: Attach, seconds: float) -> dict[str, Any]:
        """One contender, in about `seconds`: no trial begins after them, and none may take longer than them."""
        begin = time.monotonic()
        upper = self._upper(name)

        def trial(seq: int) -> Trial:
            return self._try(name, attach, seq, max(1.0, seconds))

        def has_time() -> bool:
            return time.monotonic() - begin < seconds

        guess = self._guess(trial, upper)
        found = search(trial, guess, self._unit, upper, has_time)
        return {
            "kind": "longest",
            "label": name,
            "guess": guess,
            "upper": upper,
            "seconds": time.monotonic() - begin,
            **asdict(found),
        }

    def _guess(self, trial: Callable[[int], Trial], upper: int) -> int:
        """By a straight line through the peaks of two short sequences."""
        if self._device_bytes is None:
            return upper
        short = [trial(seq) for seq in (2 * self._unit, 4 * self._unit)]
        if not all(one.trains for one in short):
            return self._unit
        base, per_token = line_through(*short)
        return upper if per_token <= 0 else max(self._unit, min(upper, int((self._device_bytes - base) / per_token)))

    def _try(self, name: str, attach: Attach, seq: int, seconds: float) -> Trial:
        begin = time.monotonic()
        reason, is_final = None, True
        with self._bench.clean():
            self._gauge.start()
            try:
                self._bench.workload.set_length(seq)
                with attach(self._bench.workload) as attached:
                    try:
                        with self._bench.watch(seconds):
                            for _ in range(NUM_STEPS):
                                self._bench.on_step(f"{name}, {seq:,} tokens")
                                self._bench.workload.step(attached)
                                self._bench.workload.wait()
                    except Exception as error:
                        reason, is_final = describe(error), not isinstance(error, OutOfTime)
            except Exception as error:
                reason = reason or describe(error)
            peak = self._gauge.read()["peak_reserved_bytes"]
        return Trial(
            seq=seq,
            trains=reason is None,
            reason=reason,
            is_final=is_final,
            peak_reserved_bytes=peak,
            seconds=time.monotonic() - begin,
        )
