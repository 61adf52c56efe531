# SPDX-License-Identifier: Apache-2.0
"""`Known`: predicts steps with any decision from one measured step."""

from __future__ import annotations

import dataclasses
import logging
from typing import Final

from offload_engine._budget.agreement import Agree
from offload_engine.errors import BudgetError
from offload_engine.planning.allocations import RecordedStep
from offload_engine.planning.choices import Slot
from offload_engine.planning.choose import Chosen, below_floor_text, choose, refitted, remeasured, repredicted
from offload_engine.planning.memory import Job, MemoryModel
from offload_engine.planning.predict import Costs, Prediction, Predictor, floor_ms_of, refitted_floor_ms
from offload_engine.planning.recompute import options_of, with_recomputation
from offload_engine.planning.replay import replayed
from offload_engine.planning.shortened import shortened
from offload_engine.planning.steps import Decision, Steps
from offload_engine.schedule import Action
from offload_engine.sizes import short_size

_MOST_EVENTS: Final = 120_000
"""Of all replays: these take about 0.4 seconds."""
_MOST_REPLAYS: Final = 24  # for one choice
_MOST_ROOMS: Final = 6
_ROOM_STEPS: Final = 20
_WORTH_A_REPLAY: Final = 0.995
"""Share of the time of a step that fits by which another one is tried."""
_PEAK_TOLERANCE: Final = 1 / 32
_UNSOUND: Final = (
    "offload budget: by measured peaks a step allocates %s, by replayed allocations, on this rank, %s. So what its "
    "allocator reserves in vain is predicted by shares of the measured step from here on, and corrected by later steps."
)

logger = logging.getLogger(__name__)


class Known:
    """Predicts and chooses, for steps of any actions, from one step that was measured with everything offloaded.

    Args:
        job: the measured step, with bytes and times.
        model: model of its memory.
        costs: costs of moves, with the time of that step.
        varied_share: share of the groups' bytes on the device by which steps with one decision may differ.
        recorded: allocations of the measured step, from which those of other steps are replayed; None: not known.

    Attributes:
        job: see the argument.
        model: corrected by the memory of later steps.
        costs: corrected by the times of later steps.
        varied_share: see the argument.
    """

    def __init__(
        self,
        job: Job,
        model: MemoryModel,
        costs: Costs,
        varied_share: float = 0.0,
        recorded: RecordedStep | None = None,
    ) -> None:
        self.job: Job = job
        self.model: MemoryModel = model
        self.costs: Costs = costs
        self.varied_share: float = varied_share
        self._recorded = recorded
        self._replays_left = 0  # of the running choice
        self._steps: dict[tuple[Action, ...], Steps] = {}  # planned and simulated; corrections do not affect them
        self._few: dict[tuple[Action, ...], Steps] = {}  # shortened, by the actions of the whole step

    def choose(
        self,
        actions: tuple[Action, ...],
        budget_bytes: int,
        guard_bytes: int = 0,
        left_bytes: int = 0,
        *,
        recomputed: frozenset[Slot] | None = None,
        must_fit: bool = True,
        agree: Agree | None = None,
    ) -> Chosen:
        """Choose for steps with these actions; see `planning.choose.choose`.

        Args:
            actions: of the steps.
            budget_bytes: see `choose`.
            guard_bytes: of the budget, to be left by a step that was not replayed.
            left_bytes: of the budget, to be left by any step.
            recomputed: see `choose`.
            must_fit: see `choose`.
            agree: with the ranks that choose the same now. What was chosen is then replayed, and another step chosen if
                it would reserve too much, or if less than expected leaves room. None: nothing is replayed.
        """
        steps = self._steps_of(actions)
        few = self._few_of(steps)

        def choose_with(model: MemoryModel, guard_bytes: int) -> Chosen:
            """Choose for a few of the microbatches; predict what was chosen for all of them."""
            found = choose(
                few.job,
                model if few is steps else model.of_few(few.planned(Decision()).residents.moved_bytes),
                budget_bytes,
                self._costs_of(few),
                must_fit=must_fit and few is steps,
                recomputed=recomputed,
                steps=few,
                guard_bytes=guard_bytes,
            )
            if few is steps:
                return found
            found = repredicted(found, Predictor(steps.job, model, self._costs_of(steps), steps))
            if must_fit and found.floor.held_bytes > budget_bytes:
                raise BudgetError(below_floor_text(budget_bytes, found.floor))
            return found

        self._replays_left = 0 if self._recorded is None else _num_replays(self._recorded)
        settled: Chosen | None = None
        while agree is not None and self._can_replay(steps):
            chosen = choose_with(self.model.hoping(min(steps.wasted_bytes.values(), default=None)), left_bytes)
            most_ms = float("inf") if settled is None else _WORTH_A_REPLAY * settled.best.step_ms
            if not _is_known(steps, chosen.floor):
                self._replay(steps, chosen.floor, agree)
            elif _is_known(steps, chosen.best):
                return chosen
            elif settled is not None and chosen.best.step_ms > most_ms:
                return settled
            else:
                self._replay_rooms(steps, chosen.best, budget_bytes - left_bytes, most_ms, agree)
            settled = self._best_known(steps, chosen, budget_bytes - left_bytes)
        if settled is None or self._recorded is None:
            return choose_with(self.model, guard_bytes + left_bytes)
        return settled

    def _best_known(self, steps: Steps, chosen: Chosen, limit_bytes: int) -> Chosen | None:
        """Return the choice with the shortest step that fits, of those that were replayed or measured."""
        predictor = Predictor(steps.job, self.model, self._costs_of(steps), steps)
        known = map(predictor.predict, (Decision(), *steps.wasted_bytes))
        fitting = [each for each in known if each.held_bytes <= limit_bytes]
        return chosen._replace(best=min(fitting, key=lambda each: each.step_ms)) if fitting else None

    def _replay_rooms(self, steps: Steps, best: Prediction, limit_bytes: int, most_ms: float, agree: Agree) -> None:
        """Replay what was chosen, and if it does not fit, the same with less room, while that takes no longer.

        In small steps: with less room the allocator may also reserve more.
        """
        predictor = Predictor(steps.job, self.model, self._costs_of(steps), steps)
        for _ in range(_MOST_ROOMS):
            self._replay(steps, best, agree)
            choices, room = best.decision
            is_over = predictor.held_bytes(best.decision) > limit_bytes
            if room is None or not is_over or not self._can_replay(steps):
                return
            best = predictor.predict(Decision(choices, room - room // _ROOM_STEPS))
            if best.step_ms > most_ms:
                return

    def _can_replay(self, steps: Steps) -> bool:
        return self._recorded is not None and self._replays_left > 0 and steps.job.actions == self.job.actions

    def _replay(self, steps: Steps, best: Prediction, agree: Agree) -> None:
        """Find out what the allocator would reserve in vain; if that is not known, nothing is replayed any more."""
        decision, recorded = best.decision, self._recorded
        assert recorded is not None
        self._replays_left -= 1
        found = replayed(recorded, self.job, decision, self.costs.options)
        peak = best.allocated_bytes
        # The peak is known from measurements, too: a replay that comes to a lower one has missed something. One that
        # comes to a higher one knows more, for instance what a recomputation allocates between two boundaries.
        is_sound = found is not None and found.peak_bytes >= (1 - _PEAK_TOLERANCE) * peak
        own = found.reserved_bytes - peak if found is not None and is_sound else 0
        wasted, is_unsound = agree((own, int(not is_sound)))
        if is_unsound:
            logger.info(_UNSOUND, short_size(peak), "nothing" if found is None else short_size(found.peak_bytes))
            self._recorded = None
        else:
            steps.wasted_bytes[decision] = wasted

    def note_wasted(self, prediction: Prediction, actions: tuple[Action, ...], more_bytes: int) -> None:
        """Note that steps of a decision reserve so much more in vain than was predicted."""
        model = self.model
        wasted = prediction.overhead_bytes - (model.overhead_bytes - model.wasted_bytes)
        self._steps_of(actions).wasted_bytes[prediction.decision] = wasted + more_bytes

    def remeasured(self, chosen: Chosen, actions: tuple[Action, ...], held_bytes: int, overhead_bytes: int) -> Chosen:
        """Return a choice with the predictions of the current model, given what a step of it held; see `remeasured`."""
        return remeasured(chosen, held_bytes, overhead_bytes, self.model, self._steps_of(actions))

    def chunk_bytes(self, chosen: Chosen | None) -> list[int]:
        """Return how many bytes each chunk saves under a choice, by virtual stage."""
        shapes = self.job.shapes
        if chosen is not None:
            options = options_of(self.costs.options, chosen.best.decision.choices.recomputed)
            shapes = with_recomputation(shapes, options)
        return [sum(group.nbytes for group in shape.groups) for shape in shapes]

    def refit(self, chosen: Chosen, actions: tuple[Action, ...], measured_ms: float) -> Chosen | None:
        """Lower the time of the measured step if a later one shows that it was delayed.

        Args:
            chosen: for the later step.
            actions: of the later step.
            measured_ms: that it took.

        Returns:
            What was chosen, with other times; None: nothing has changed, so what others were chosen by is the same.
        """
        floor_ms = self.costs.floor_ms
        if floor_ms is None or actions != self.job.actions:
            return None
        steps = self._steps_of(actions)
        floor = steps.outcome(Decision())
        refitted_ms = refitted_floor_ms(floor, floor_ms, chosen.best, chosen.busy_ratio, measured_ms)
        if refitted_ms >= floor_ms:
            return None
        self.costs = dataclasses.replace(self.costs, floor_ms=refitted_ms)
        return refitted(chosen, Predictor(self.job, self.model, self.costs, steps))

    def _costs_of(self, steps: Steps) -> Costs:
        """Return the costs in these steps: the time of the floor was measured with the actions of one step."""
        measured, floor_ms = self._steps_of(self.job.actions), self.costs.floor_ms
        if steps is measured or floor_ms is None:
            return self.costs
        other, floor = (each.outcome(Decision()) for each in (steps, measured))
        return dataclasses.replace(self.costs, floor_ms=floor_ms_of(other, floor, floor_ms))

    def _few_of(self, steps: Steps) -> Steps:
        """Return steps of few microbatches, by which to choose for these. The allocator reserves the same for both."""
        actions = steps.job.actions
        few = shortened(actions)
        if few == actions:
            return steps
        if actions not in self._few:
            self._few[actions] = self._new_steps(few)
            self._few[actions].wasted_bytes = steps.wasted_bytes
        return self._few[actions]

    def _steps_of(self, actions: tuple[Action, ...]) -> Steps:
        if actions not in self._steps:
            self._steps[actions] = self._new_steps(actions)
        return self._steps[actions]

    def _new_steps(self, actions: tuple[Action, ...]) -> Steps:
        return Steps(dataclasses.replace(self.job, actions=actions), self.costs.link, self.costs.options)


def _is_known(steps: Steps, prediction: Prediction) -> bool:
    """Return whether that step was measured, with everything offloaded, or replayed."""
    return prediction.decision == Decision() or prediction.decision in steps.wasted_bytes


def _num_replays(recorded: RecordedStep) -> int:
    return min(_MOST_REPLAYS, _MOST_EVENTS // max(1, recorded.most_events))
