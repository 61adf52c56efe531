# SPDX-License-Identifier: Apache-2.0
"""`ReplayedChoice`: chooses by replays, which tell what the allocator reserves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from offload_engine._budget.agreement import Agree
from offload_engine.planning.allocations import RecordedStep
from offload_engine.planning.choose import Chosen
from offload_engine.planning.memory import Job
from offload_engine.planning.predict import Prediction, Predictor
from offload_engine.planning.recompute import cheapest_first, recomputing
from offload_engine.planning.replay import replayed
from offload_engine.planning.steps import Decision
from offload_engine.sizes import short_size

_MOST_EVENTS: Final = 120_000
"""Of all replays: these take about 0.6 seconds."""
_MOST_REPLAYS: Final = 16
_MOST_ROOMS: Final = 6
_ROOM_STEPS: Final = 20
_WORTH_A_REPLAY: Final = 0.995
"""Share of the cost of a step that fits by which another one is tried."""
_WORTH_CERTAINTY: Final = 1.01
"""How much more a step may cost of which the allocator reserves the same wherever its segments are. (In steps of an
H200 such predictions were exact, and others up to 2 GiB off.)"""
_UNCERTAIN_BYTES: Final = 1 << 28
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
        self._agree = agree
        self._num_left = min(_MOST_REPLAYS, _MOST_EVENTS // max(1, recorded.most_events))

    def choose(self, choose_by: Callable[[int | None], Chosen], *, is_free: bool) -> Chosen | None:
        """Return a choice that was replayed or measured, and fits; None if there is none.

        Args:
            choose_by: chooses, given the least that a step was seen to reserve in vain.
            is_free: it may choose what is recomputed.
        """
        if is_free:
            self._replay_lowest()
        settled: Chosen | None = None
        while self.is_sound and self._num_left > 0:
            chosen = choose_by(min(self._steps.wasted_bytes.values(), default=None))
            most = float("inf") if settled is None else self._most_cost(settled.best)
            if not self._is_known(chosen.floor):
                self._replay(chosen.floor, is_floor=True)
            elif self._is_known(chosen.best):
                return self._best_known(chosen) or chosen
            elif chosen.best.cost_ms > most:
                return settled
            else:
                self._replay_rooms(chosen.best, most)
            settled = self._best_known(chosen)
        return settled if self.is_sound else None

    def _replay_lowest(self) -> None:
        """Replay what may be the floor, so that the first choice is made by it."""
        predictor = self._predictor()
        decision = Decision(recomputing(cheapest_first(predictor.costs.options)))
        if decision != Decision() and decision not in self._steps.wasted_bytes and self._num_left > 0:
            lowest = predictor.predict(decision)
            if lowest.held_bytes < predictor.floor.held_bytes:
                self._replay(lowest, is_floor=True)

    def _best_known(self, chosen: Chosen) -> Chosen | None:
        """Return the choice with the step that costs least and fits, of those that were replayed or measured."""
        known = map(self._predictor().predict, (Decision(), *self._steps.wasted_bytes))
        fitting = [each for each in known if each.held_bytes <= self._limit_bytes]
        return chosen._replace(best=min(fitting, key=self._cost)) if fitting else None

    def _cost(self, prediction: Prediction) -> float:
        return prediction.cost_ms * (_WORTH_CERTAINTY if prediction.decision in self._steps.uncertain else 1.0)

    def _most_cost(self, settled: Prediction) -> float:
        """Return up to which cost another step is worth a replay."""
        is_uncertain = settled.decision in self._steps.uncertain
        return settled.cost_ms * (_WORTH_CERTAINTY if is_uncertain else _WORTH_A_REPLAY)

    def _replay_rooms(self, best: Prediction, most: float) -> None:
        """Replay what was chosen; if it does not fit, or that is not certain, the same with less room.

        In small steps, since with less room the allocator may also reserve more, and up to the cost `most`.
        """
        predictor = self._predictor()
        for _ in range(_MOST_ROOMS):
            self._replay(best)
            choices, room = best.decision
            fits = predictor.held_bytes(best.decision) <= self._limit_bytes
            is_certain = best.decision not in self._steps.uncertain
            if room is None or (fits and is_certain) or not self.is_sound or self._num_left <= 0:
                return
            if fits:
                most = min(most, self._most_cost(best))
            best = predictor.predict(Decision(choices, room - room // _ROOM_STEPS))
            if best.cost_ms > most:
                return

    def _is_known(self, prediction: Prediction) -> bool:
        """Return whether that step was measured, with everything offloaded, or replayed."""
        return prediction.decision == Decision() or prediction.decision in self._steps.wasted_bytes

    def _replay(self, prediction: Prediction, *, is_floor: bool = False) -> None:
        """Find out what the allocator would reserve in vain; of a floor at the least, or a budget might be refused."""
        self._num_left -= 1
        decision = prediction.decision
        found = replayed(self._recorded, self._job, decision, self._predictor().costs.options)
        peak = prediction.allocated_bytes
        # The peak is known from measurements, too: a replay that comes to a lower one has missed something. One that
        # comes to a higher one knows more, for instance what a recomputation allocates between two boundaries.
        is_sound = found is not None and found.peak_bytes >= (1 - _PEAK_TOLERANCE) * peak
        own = (found.reserved_bytes - peak, found.varied_bytes) if found is not None and is_sound else (0, 0)
        if is_floor:
            own = own[0] - own[1], own[1]
        wasted, varied, is_unsound = self._agree((*own, int(not is_sound)))
        if is_unsound:
            logger.info(_UNSOUND, short_size(peak), "nothing" if found is None else short_size(found.peak_bytes))
            self.is_sound = False
            return
        self._steps.wasted_bytes[decision] = wasted
        if varied > _UNCERTAIN_BYTES:
            self._steps.uncertain.add(decision)
