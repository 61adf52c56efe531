# SPDX-License-Identifier: Apache-2.0
"""`ReplayedChoice`: chooses by replays, which tell what the allocator reserves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

from offload_engine._budget.agreement import Agree
from offload_engine.planning.allocations import RecordedStep
from offload_engine.planning.choose import Chosen
from offload_engine.planning.memory import Job
from offload_engine.planning.predict import Prediction, Predictor
from offload_engine.planning.recompute import cheapest_first, recomputing
from offload_engine.planning.replay import SPARE_SHARE, replayed, with_spare
from offload_engine.planning.segments import Reserved
from offload_engine.planning.steps import Decision
from offload_engine.sizes import short_size

_MOST_EVENTS: Final = 80_000
"""Of all replays: these take about 0.4 seconds."""
_MOST_REPLAYS: Final = 16
_MOST_ROOMS: Final = 3
_ROOM_STEPS: Final = 20
_WORTH_TRYING: Final = 1 / 256
"""Share of the budget by which other steps might reserve less than expected."""
_WORTH_A_REPLAY: Final = 0.995
"""Share of the cost of a step that fits by which another one is tried."""
_SHARES_TO_SPARE: Final = (SPARE_SHARE, 1 / 32, 1 / 128, 3 / 64)
"""Of an arena, in the order in which they are tried."""
_PEAK_TOLERANCE: Final = 1 / 32
_UNSOUND: Final = (
    "offload budget: by measured peaks a step allocates %s, by replayed allocations, on this rank, %s. So what its "
    "allocator reserves in vain is predicted by shares of the measured step from here on, and corrected by later steps."
)

logger = logging.getLogger(__name__)


class ReplayedChoice:
    """Replays what is chosen, and chooses again by what that reserves, until what was chosen has been replayed.

    Args:
        recorded: the allocations of the measured step.
        job: the measured step.
        predictor: returns one with what is known now, for steps of the same actions.
        limit_bytes: what a step may hold.
        agree: with the ranks that choose the same now.

    Attributes:
        is_sound: False once a replay was not believed: none is of use then.
    """

    def __init__(
        self, recorded: RecordedStep, job: Job, predictor: Callable[[], Predictor], limit_bytes: int, agree: Agree
    ) -> None:
        self.is_sound: bool = True
        self._recorded = recorded
        self._job = job
        self._predictor = predictor
        self._steps = predictor().steps
        self._limit_bytes = limit_bytes
        self._found: dict[Decision, Reserved] = {}  # of this rank
        self._agree = agree
        self._num_left = min(_MOST_REPLAYS, _MOST_EVENTS // max(1, recorded.most_events))

    def choose(self, choose_by: Callable[[int | None], Chosen], *, is_free: bool) -> Chosen | None:
        """Return a choice that was replayed, and fits; if none does, the lowest one. None: nothing can be replayed.

        Args:
            choose_by: chooses, given what a step is thought to reserve in vain: the least that one was seen to.
            is_free: it may choose what is recomputed.
        """
        if is_free:
            self._replay_lowest()
        chosen = settled = None
        expected = least = min(self._steps.wasted_bytes.values(), default=None)
        while self.is_sound and self._num_left > 0:
            chosen = choose_by(expected)
            most = float("inf") if settled is None else _WORTH_A_REPLAY * settled.best.cost_ms
            if chosen.floor.decision not in self._steps.wasted_bytes:
                self._replay(chosen.floor)
            elif chosen.best.decision in self._steps.wasted_bytes:
                if expected is None or least is None or expected - least <= _WORTH_TRYING * self._limit_bytes:
                    break
                expected = (expected + least) // 2
            elif chosen.best.cost_ms > most:
                break
            else:
                expected = self._replay_rooms(chosen.best, most) or expected
            settled = self._best_known(chosen)
        if chosen is None or not self.is_sound:
            return None
        return self._with_arena(self._best_known(chosen) or self._lowest_known(chosen))

    def _replay_lowest(self) -> None:
        """Replay what may be the floor, so that the first choice is made by it."""
        predictor = self._predictor()
        lowest = Decision(recomputing(cheapest_first(predictor.costs.options)))
        for decision in dict.fromkeys((Decision(), lowest)):
            if self.is_sound and self._num_left > 0 and decision not in self._steps.wasted_bytes:
                self._replay(predictor.predict(decision))

    def _best_known(self, chosen: Chosen) -> Chosen | None:
        """Return the choice with the step that costs least and fits, of those that were replayed."""
        fitting = [each for each in self._known() if each.held_bytes <= self._limit_bytes]
        return chosen._replace(best=min(fitting, key=lambda each: each.cost_ms)) if fitting else None

    def _lowest_known(self, chosen: Chosen) -> Chosen:
        """Return the choice with the step that holds least, of those that were replayed."""
        return chosen._replace(best=min(self._known(), key=lambda each: each.held_bytes))

    def _known(self) -> Iterable[Prediction]:
        return map(self._predictor().predict, self._steps.wasted_bytes)

    def _with_arena(self, chosen: Chosen) -> Chosen:
        """Return the choice with an arena that has an end, and in which all blocks have room."""
        decision = chosen.best.decision
        if decision not in self._steps.wasted_bytes or decision in self._steps.arena_bytes:
            return chosen
        found = self._found.get(decision) or self._replayed(decision)
        assert found is not None
        usual = with_spare(found.arena_bytes)  # of which the replay has told what is reserved
        for share in _SHARES_TO_SPARE:
            arena = with_spare(found.arena_bytes, share)
            again = self._replayed(decision, arena)
            more = arena - usual
            has_room = again is not None and again.reserved_bytes <= found.reserved_bytes + more
            if has_room and chosen.best.held_bytes + more <= self._limit_bytes:
                break
        else:
            arena, more = usual, 0
        self._steps.arena_bytes[decision] = arena
        [most] = self._agree((more,))
        self._steps.wasted_bytes[decision] += most
        return chosen._replace(best=self._predictor().predict(decision))

    def _replay_rooms(self, best: Prediction, most: float) -> int | None:
        """Replay what was chosen; if it does not fit, the same with less room, up to the cost `most`.

        Returns:
            If none of them fits, the least that one reserves in vain: what is chosen next will reserve as much.
        """
        predictor, tried = self._predictor(), list[int]()
        for _ in range(_MOST_ROOMS):
            self._replay(best)
            choices, room = best.decision
            over = predictor.held_bytes(best.decision) - self._limit_bytes
            if over <= 0 or not self.is_sound:
                return None
            tried.append(self._steps.wasted_bytes[best.decision])
            less = 0 if room is None else room - max(over, room // _ROOM_STEPS)
            if less <= 0 or self._num_left <= 0:
                break
            best = predictor.predict(Decision(choices, less))
            if best.cost_ms > most:
                break
        return min(tried)

    def _replay(self, prediction: Prediction) -> None:
        """Find out what the allocator would reserve in vain."""
        self._num_left -= 1
        decision = prediction.decision
        found = self._replayed(decision)
        peak = prediction.allocated_bytes
        # The peak is known from measurements, too: a replay that comes to a lower one has missed something. One that
        # comes to a higher one knows more, for instance what a recomputation allocates between two boundaries.
        is_sound = found is not None and found.peak_bytes >= (1 - _PEAK_TOLERANCE) * peak
        own = found.reserved_bytes - peak if found is not None and is_sound else 0
        wasted, is_unsound = self._agree((own, int(not is_sound)))
        if is_unsound:
            logger.info(_UNSOUND, short_size(peak), "nothing" if found is None else short_size(found.peak_bytes))
            self.is_sound = False
            return
        assert found is not None
        self._steps.wasted_bytes[decision], self._found[decision] = wasted, found

    def _replayed(self, decision: Decision, arena_bytes: int | None = None) -> Reserved | None:
        return replayed(self._recorded, self._job, decision, self._predictor().costs.options, arena_bytes)
