"""Searches the longest sequence of each contender, within a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from bench_gpu.measure import Gauge

from .contenders import Attach
from .longest import Limits, Trial, predict, predict_seconds, search
from .turns import Bench, describe, pinned_of
from .watch import OutOfTime
from .workload import Attached

_PATIENCE = 2.0  # a trial may take so many times what was predicted: pinning and retries of the allocator vary
_LEAST_S = 10.0
_TOO_LATE = "there was no time left for it"


class LongestBench:
    """Searches the longest sequence of each contender.

    A trial is one step, with gradients there from the start: they, and not what the step before left in the
    allocator's cache (which it gives up when memory is short), are what a second step would find besides.

    Args:
        bench: of the model, whose sequence this changes.
        gauge: of memory.
        unit: lengths are multiples of it.
        limits: of a contender; None where nothing bounds it but a length (the CPU).
        upper: no longer than this, for a contender.
        clock: seconds.
    """

    def __init__(
        self,
        bench: Bench,
        gauge: Gauge,
        unit: int,
        limits: Callable[[str], Limits] | None,
        upper: Callable[[str], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bench = bench
        self._gauge = gauge
        self._unit = unit
        self._limits = limits
        self._upper = upper
        self._clock = clock

    def warm_up(self, attach: Attach) -> None:
        """A step whose time nobody looks at: kernels are chosen in it."""
        self._try("warm-up", attach, self._unit, 60.0)

    def run(self, name: str, attach: Attach, seconds: float) -> dict[str, Any]:
        """One contender. No trial begins that would, by prediction, be over later than in `seconds`."""
        begin = self._clock()
        upper = self._upper(name)

        def left() -> float:
            return seconds - (self._clock() - begin)

        short: list[Trial] = []
        guess = upper
        if self._limits is not None:
            for length in (self._unit, 2 * self._unit):
                if left() > 0 and all(one.trains for one in short):
                    short.append(self._try(name, attach, length, max(_LEAST_S, left())))
            guess = predict(*short, self._limits(name)) if _tell_enough(short) else self._unit

        def expected(seq: int) -> float:
            return predict_seconds(short[0], short[1], seq) if _tell_enough(short) else 0.0

        def trial(seq: int) -> Trial:
            return self._try(name, attach, seq, max(_LEAST_S, left(), _PATIENCE * expected(seq)))

        def has_time(seq: int) -> bool:
            return left() > expected(seq)

        found = search(trial, guess, self._unit, upper, has_time, short)
        return {
            "kind": "longest",
            "label": name,
            "guess": guess if _tell_enough(short) else None,
            "upper": upper,
            "seconds": self._clock() - begin,
            **asdict(found),
            "reason": found.reason or (None if found.is_final else _TOO_LATE),
        }

    def _try(self, name: str, attach: Attach, seq: int, seconds: float) -> Trial:
        reason, is_final, host_bytes, taken = None, True, 0, 0.0
        with self._bench.clean():
            self._gauge.start()
            try:
                self._bench.workload.set_length(seq)
                self._bench.workload.make_gradients()
                with attach(self._bench.workload) as attached:
                    begin = self._clock()
                    try:
                        self._step(f"{name}, {seq:,} tokens", attached, seconds)
                    except Exception as error:  # its traceback, with the frames that hold tensors, ends here
                        reason, is_final = describe(error), not isinstance(error, OutOfTime)
                    taken = self._clock() - begin
                    host_bytes = pinned_of(self._gauge, attached)
            except Exception as error:
                reason = reason or describe(error)
            peak = self._gauge.read()["peak_reserved_bytes"]
        return Trial(
            seq=seq,
            trains=reason is None,
            reason=reason,
            is_final=is_final,
            peak_reserved_bytes=peak,
            host_bytes=host_bytes,
            seconds=taken,
        )

    def _step(self, what: str, attached: Attached, seconds: float) -> None:
        with self._bench.watch(seconds):
            self._bench.on_step(what)
            self._bench.workload.step(attached)
            self._bench.workload.wait()


def _tell_enough(short: list[Trial]) -> bool:
    """Whether two short trials trained, which a prediction needs."""
    return len(short) == 2 and all(one.trains for one in short)
