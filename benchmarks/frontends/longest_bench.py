"""Searches the longest sequence of each contender, within a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.gpu.measure import Gauge

from .contenders import Attach
from .longest import Limits, Search, Trial, predict, predict_seconds
from .turns import Bench, describe
from .watch import CrowdedOut, OutOfTime
from .workload import Attached

_PATIENCE = 2.0  # a trial may take so many times what was predicted: pinning and retries of the allocator vary
_LEAST_S = 10.0
_TOO_LATE = "there was no time left for it"
_MOST_TRIALS = 5  # of one contender before all others had their turn: a right guess needs two


@dataclass
class _Contender:
    """How far the search of one has come."""

    name: str
    attach: Attach
    upper: int
    flops: Callable[[int], float]
    short: list[Trial] = field(default_factory=list)
    guess: int | None = None
    search: Search | None = None
    remains: list[dict[str, int]] = field(default_factory=list)  # of each trial
    seconds: float = 0.0
    is_stuck: bool = False  # a trial said nothing of its length: no other does before the next pass

    @property
    def is_final(self) -> bool:
        return self.search is not None and self.search.is_final

    def expected_seconds(self) -> float:
        """Return the expected time of the next trial."""
        if self.guess is None or self.search is None:
            return 0.0
        return predict_seconds(*self.short, self.search.next_seq, self.flops)


@dataclass
class _Seen:
    """Of one step."""

    reason: str | None = None
    is_final: bool = True
    engine_bytes: int = 0
    seconds: float = 0.0


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
        flops: of a sequence of so many tokens, to any scale.
        on_record: told of each trial.
        clock: seconds.
    """

    def __init__(
        self,
        bench: Bench,
        gauge: Gauge,
        unit: int,
        *,
        limits: Callable[[str], Limits] | None,
        upper: Callable[[str], int],
        flops: Callable[[int], float],
        on_record: Callable[[dict[str, Any]], None] = lambda record: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bench = bench
        self._gauge = gauge
        self._unit = unit
        self._limits = limits
        self._upper = upper
        self._flops = flops
        self._on_record = on_record
        self._clock = clock
        self._end = 0.0

    def warm_up(self, attach: Attach) -> None:
        """Run a step that is not timed: kernels are selected in it."""
        self._try(_Contender("warm-up", attach, self._unit, self._flops), self._unit, 60.0)

    def run(
        self,
        contenders: Mapping[str, Attach],
        seconds: float,
        contender_seconds: float,
        known: Mapping[str, Sequence[Trial]] | None = None,
    ) -> list[dict[str, Any]]:
        """Run all contenders; return a record for each.

        First each has two short trials. Then each searches, in this order. Who has not found it, because its own time
        was over or the next trial would have ended too late, goes on with what time is left, the shortest trial first.
        No trial begins that would, by prediction, be over later than in `seconds`.

        Args:
            contenders: in the order in which they search.
            seconds: for all of them.
            contender_seconds: for the first search of one.
            known: trials of an earlier search, by contender: they are not made again.
        """
        known = known or {}
        self._end = self._clock() + seconds
        entries = [_Contender(name, attach, self._upper(name), self._flops) for name, attach in contenders.items()]
        for entry in entries:
            self._prepare(entry, known.get(entry.name, ()))
        for entry in entries:
            for _ in range(_MOST_TRIALS):
                if not self._may_go_on(entry) or entry.seconds >= contender_seconds:
                    break
                self._go_on(entry)
        for entry in entries:
            entry.is_stuck = False
        for entry in self._shortest_first(entries):
            self._go_on(entry)
        return [self._record(entry) for entry in entries]

    def _left(self) -> float:
        return self._end - self._clock()

    def _may_go_on(self, entry: _Contender) -> bool:
        if entry.search is None or entry.is_final or entry.is_stuck:
            return False
        return self._left() > entry.expected_seconds()

    def _shortest_first(self, entries: list[_Contender]) -> Iterator[_Contender]:
        while possible := [entry for entry in entries if self._may_go_on(entry)]:
            yield min(possible, key=_Contender.expected_seconds)

    def _prepare(self, entry: _Contender, known: Sequence[Trial]) -> None:
        """Run two short trials, and predict from them."""
        first = entry.upper
        if self._limits is not None:
            for length in (self._unit, 2 * self._unit):
                if length <= entry.upper and self._left() > 0 and all(one.trains for one in entry.short):
                    entry.short.append(self._short(entry, length, known))
            first = self._unit
            if len(entry.short) == 2 and entry.short[-1].trains:
                first = entry.guess = predict(*entry.short, self._limits(entry.name))
        if self._left() > 0:
            trials = {one.seq: one for one in (*known, *entry.short)}
            entry.search = Search(first, self._unit, entry.upper, [*trials.values()])

    def _short(self, entry: _Contender, length: int, known: Sequence[Trial]) -> Trial:
        found = next((one for one in known if one.seq == length), None)
        return found or self._try(entry, length, max(_LEAST_S, self._left()))

    def _go_on(self, entry: _Contender) -> None:
        """Run the next trial of one contender. It may take its own time, but not that of all others."""
        assert entry.search is not None
        seconds = max(_LEAST_S, _PATIENCE * entry.expected_seconds())
        if entry.guess is None:
            seconds = max(_LEAST_S, self._left())
        trial = self._try(entry, entry.search.next_seq, seconds)
        entry.search.note(trial)
        entry.is_stuck = not trial.trains and not trial.is_final

    def _record(self, entry: _Contender) -> dict[str, Any]:
        found = (entry.search or Search(self._unit, self._unit, entry.upper, entry.short)).found()
        return {
            "kind": "longest",
            "label": entry.name,
            "guess": entry.guess,
            "upper": entry.upper,
            "seconds": entry.seconds,
            **asdict(found),
            **{name: max(one[name] for one in entry.remains) for name in (entry.remains[0] if entry.remains else ())},
            "reason": found.reason or (None if found.is_final else _TOO_LATE),
        }

    def _try(self, entry: _Contender, seq: int, seconds: float) -> Trial:
        begin = self._clock()
        with self._bench.clean() as remains:
            self._gauge.start()
            seen = self._take(entry, seq, seconds)
            memory = self._gauge.read()
        entry.remains.append(remains)
        entry.seconds += self._clock() - begin
        trial = Trial(
            seq=seq,
            trains=seen.reason is None,
            reason=seen.reason,
            is_final=seen.is_final,
            peak_allocated_bytes=memory["peak_allocated_bytes"],
            peak_reserved_bytes=memory["peak_reserved_bytes"],
            host_bytes=memory["peak_pinned_bytes"] + seen.engine_bytes,
            seconds=seen.seconds,
        )
        self._on_record({"kind": "trial", "label": entry.name, **asdict(trial), **remains})
        return trial

    def _take(self, entry: _Contender, seq: int, seconds: float) -> _Seen:
        """Run the step itself. In a function of its own, so that nothing of the contender outlives it."""
        seen = _Seen()
        try:
            self._bench.workload.set_length(seq)
            self._bench.workload.make_gradients()
            with entry.attach(self._bench.workload) as attached:
                begin = self._clock()
                try:
                    self._step(f"{entry.name}, {seq:,} tokens", attached, seconds)
                except Exception as error:  # its traceback, with the frames that hold tensors, ends here
                    seen.reason, seen.is_final = describe(error), not isinstance(error, (OutOfTime, CrowdedOut))
                seen.seconds = self._clock() - begin
                stats = attached.stats()
                seen.engine_bytes = 0 if stats is None else int(stats.host_bytes)
        except Exception as error:
            seen.reason = seen.reason or describe(error)
        return seen

    def _step(self, what: str, attached: Attached, seconds: float) -> None:
        with self._bench.watch(seconds):
            self._bench.on_step(what)
            self._bench.workload.step(attached)
            self._bench.workload.wait()
