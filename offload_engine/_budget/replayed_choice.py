# SPDX-License-Identifier: Apache-2.0
"""`ReplayedChoice`: chooses by replays, which tell what the allocator reserves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

from offload_engine._budget.agreement import Agree
from offload_engine._budget.arenas import Arena, arena_for, tight_arena
from offload_engine._budget.own_groups import OwnGroups
from offload_engine.planning.allocations import RecordedStep
from offload_engine.planning.choose import Chosen
from offload_engine.planning.memory import Job
from offload_engine.planning.predict import Prediction, Predictor
from offload_engine.planning.recompute import cheapest_first, recomputing
from offload_engine.planning.replay import Replay
from offload_engine.planning.segments import Reserved, segment_bytes, with_spare
from offload_engine.planning.steps import Decision
from offload_engine.sizes import short_size

_MOST_EVENTS: Final = 120_000
"""Of all replays, if that leaves enough of them: these take about 0.4 seconds."""
_MOST_REPLAYS: Final = 16
_LEAST_REPLAYS: Final = 8
"""Even if they take longer. (With fewer, some budgets of recorded pipelines were left with a step that was replayed
only because it is the lowest one, a third slower than the best that fits.)"""
_TOO_MANY_EVENTS: Final = 60_000
"""Of one replay: that many take 0.2 seconds."""
_MOST_ROOMS: Final = 3
_ROOM_STEPS: Final = 20
_WORTH_TRYING: Final = 1 / 256
"""Share of the budget by which other steps might reserve less than expected."""
_WORTH_A_REPLAY: Final = 0.995
"""Share of the cost of a step that fits by which another one is tried."""
_MOST_ARENAS: Final = 3
_NEAR: Final = 1 / 32
"""Share of the budget by which a step might reserve less in vain than any other one."""
_VARIES: Final = 1 / 1024
"""Share of the budget that a step leaves which just fits: what lies outside of the allocator varies by some MiB."""
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
        own: groups of this rank, if they differ from those of `job`.

    Attributes:
        is_sound: False once a replay was not believed: none is of use then.
    """

    def __init__(
        self,
        recorded: RecordedStep,
        job: Job,
        predictor: Callable[[], Predictor],
        limit_bytes: int,
        agree: Agree,
        own: OwnGroups | None = None,
    ) -> None:
        self.is_sound: bool = True
        self._recorded = recorded
        self._own = own
        self._job = job if own is None else own.job
        self._predictor = predictor
        self._steps = predictor().steps
        self._limit_bytes = limit_bytes
        self._found: dict[Decision, Reserved] = {}  # of this rank
        self._lacked_bytes = 0  # by a step that has fitted, for its arena
        self._agree = agree
        self._num_left = min(_MOST_REPLAYS, max(_LEAST_REPLAYS, _MOST_EVENTS // max(1, recorded.most_events)))

    def choose(self, choose_by: Callable[[int | None, int], Chosen], *, is_free: bool) -> Chosen | None:
        """Return a choice that was replayed, and fits; if none does, the lowest one. None: replays are of no use.

        Args:
            choose_by: chooses, given what a step is thought to reserve in vain, the least that one was seen to, and
                how much of the budget it must leave.
            is_free: it may choose what is recomputed.
        """
        if self._recorded.most_events > _TOO_MANY_EVENTS:
            return None
        if is_free:
            self._replay_lowest()
        chosen: Chosen | None = None
        for num_others in reversed(range(_MOST_ARENAS - self._recorded.has_lags)):  # whose arenas take more replays
            chosen = self._settle(choose_by, chosen, min(num_others, 1) if self._recorded.has_lags else 0)
            if chosen is None:
                return None
            chosen = self._with_arena(chosen, must_fit=not num_others)
            if chosen.best.held_bytes <= self._limit_bytes:
                break
        return chosen

    def _settle(
        self, choose_by: Callable[[int | None, int], Chosen], chosen: Chosen | None, num_spared: int
    ) -> Chosen | None:
        """Choose until what was chosen has been replayed, and fits.

        Args:
            choose_by: see `choose`.
            chosen: what was chosen before, to go on with.
            num_spared: replays to leave for others, should no arena fit that has room.

        Returns:
            The choice with the step that costs least and fits, or else with the lowest; None: replays are of no use.
        """
        settled = None if chosen is None else self._best_known(chosen)
        expected = min(self._steps.wasted_bytes.values(), default=None)
        while self.is_sound and self._num_left > num_spared:
            chosen = choose_by(expected, self._lacked_bytes)
            most = float("inf") if settled is None else _WORTH_A_REPLAY * settled.best.cost_ms
            if chosen.floor.decision not in self._steps.wasted_bytes:
                self._replay(chosen.floor)
            elif self._might_fit(chosen.top):
                self._replay(chosen.top)
            elif chosen.best.decision in self._steps.wasted_bytes:
                least = min(self._steps.wasted_bytes.values())
                if expected is None or expected - least <= _WORTH_TRYING * self._limit_bytes:
                    break
                expected = (expected + least) // 2
            elif chosen.best.cost_ms > most:
                break
            else:
                expected = self._replay_rooms(chosen.best, most) or expected
            settled = self._best_known(chosen)
        if chosen is None or not self.is_sound:
            return None
        return self._best_known(chosen) or self._best_known(chosen, 0) or self._lowest_known(chosen)

    def _might_fit(self, top: Prediction) -> bool:
        """Return whether the step in which nothing moves is unknown, and may reserve less in vain than is thought."""
        return top.decision not in self._steps.wasted_bytes and top.held_bytes <= (1 + _NEAR) * self._limit_bytes

    def _replay_lowest(self) -> None:
        """Replay what may be the floor, so that the first choice is made by it."""
        predictor = self._predictor()
        lowest = Decision(recomputing(cheapest_first(predictor.costs.options)))
        for decision in dict.fromkeys((Decision(), lowest)):
            if self.is_sound and self._num_left > 0 and decision not in self._steps.wasted_bytes:
                self._replay(predictor.predict(decision))

    def _best_known(self, chosen: Chosen, lacked_bytes: int | None = None) -> Chosen | None:
        """Return the choice with the step that costs least and fits, of those that were replayed.

        Args:
            chosen: to take the rest from.
            lacked_bytes: that a step is thought to lack which has no arena yet; None: as much as others.
        """
        limit, lacked = self._limit_bytes, self._lacked_bytes if lacked_bytes is None else lacked_bytes
        limits = {True: limit, False: limit - lacked}
        found = [each for each in self._known() if each.held_bytes <= limits[each.decision in self._steps.arena_bytes]]
        return chosen._replace(best=min(found, key=lambda each: each.cost_ms)) if found else None

    def _lowest_known(self, chosen: Chosen) -> Chosen:
        """Return the choice with the step that holds least, of those that were replayed."""
        return chosen._replace(best=min(self._known(), key=lambda each: each.held_bytes))

    def _known(self) -> Iterable[Prediction]:
        return map(self._predictor().predict, self._steps.wasted_bytes)

    def _with_arena(self, chosen: Chosen, *, must_fit: bool) -> Chosen:
        """Return the choice with an arena that has an end. If no arena fits that has room, the step does not fit.

        Args:
            chosen: a step that was replayed.
            must_fit: there is no other one: it is given what there is room for.
        """
        decision, steps = chosen.best.decision, self._steps
        if decision not in steps.wasted_bytes or decision in steps.arena_bytes:
            return chosen
        replay = self._replay_of(decision)
        found = self._found.get(decision) or replay.reserved()
        assert found is not None
        room = self._limit_bytes - chosen.best.held_bytes
        must_fit |= decision == chosen.floor.decision
        arena = arena_for(replay, found, room, must_fit=must_fit)
        [more] = self._agree((arena.more_bytes,))
        steps.arena_bytes[decision] = arena.nbytes + self._lacking_bytes(found, chosen.best.allocated_bytes)
        steps.wasted_bytes[decision] += more
        self._lacked_bytes = max(self._lacked_bytes, more - room)
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
        """Find out what the allocator would reserve in vain; with a smaller arena, if the step fits by that alone."""
        self._num_left -= 1
        decision, peak, steps = prediction.decision, prediction.allocated_bytes, self._steps
        replay = self._replay_of(decision)
        found = replay.reserved()
        # The peak is known from measurements, too: a replay that comes to a lower one has missed something. One that
        # comes to a higher one knows more, for instance what a recomputation allocates between two boundaries.
        own_peak = peak if self._own is None else self._own.peak_bytes(decision, self._recorded)
        is_sound = found is not None and found.peak_bytes >= (1 - _PEAK_TOLERANCE) * own_peak
        own, lacking, tight = 0, 0, None
        if found is not None and is_sound:
            lacking = self._lacking_bytes(found, peak)
            own = found.reserved_bytes + lacking - peak
            tight = self._tight(replay, found, decision, own)
        least = own + tight.more_bytes if tight else own
        wasted, least, is_unsound = self._agree((own, least, int(not is_sound)))
        if is_unsound:
            logger.info(_UNSOUND, short_size(own_peak), "nothing" if found is None else short_size(found.peak_bytes))
            self.is_sound = False
            return
        assert found is not None
        self._found[decision] = found
        is_tight = self._over(decision, wasted) > 0 >= self._over(decision, least)
        steps.wasted_bytes[decision] = least if is_tight else wasted
        if is_tight:
            arena = tight.nbytes if tight else with_spare(found.arena_bytes, replay.spare_share)
            steps.arena_bytes[decision] = arena + lacking

    def _tight(self, replay: Replay, found: Reserved, decision: Decision, wasted_bytes: int) -> Arena | None:
        """Return a smaller arena for a step that would fit with it; None: there is none, or the usual one fits."""
        over = self._over(decision, wasted_bytes)
        if over <= 0:
            return None
        over += round(_VARIES * self._limit_bytes)
        return tight_arena(replay, found, over)

    def _over(self, decision: Decision, wasted_bytes: int) -> int:
        """Return by how much a step does not fit, given what it reserves in vain."""
        return self._predictor().held_bytes(decision, wasted_bytes) - self._limit_bytes

    def _lacking_bytes(self, found: Reserved, peak_bytes: int) -> int:
        """Return how much less this rank has than others may have, and than it may have in the next step."""
        return 0 if self._own is None else segment_bytes(max(0, peak_bytes - found.peak_bytes))

    def _replay_of(self, decision: Decision) -> Replay:
        options = self._predictor().costs.options if self._own is None else self._own.options
        return Replay(self._recorded, self._job, decision, options)
