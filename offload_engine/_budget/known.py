# SPDX-License-Identifier: Apache-2.0
"""`Known`: predicts steps with any decision from one measured step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from offload_engine._budget.agreement import Agree
from offload_engine._budget.garbage import no_collections
from offload_engine._budget.own_groups import OwnGroups
from offload_engine._budget.replayed_choice import ReplayedChoice
from offload_engine.errors import BudgetError
from offload_engine.planning.allocations import RecordedStep
from offload_engine.planning.choices import Choices, Slot, slots_of
from offload_engine.planning.choose import (
    Chosen,
    below_floor_text,
    choose,
    completed,
    refitted,
    remeasured,
    repredicted,
)
from offload_engine.planning.fitted import fit
from offload_engine.planning.memory import Excess, Job, MemoryModel
from offload_engine.planning.pipeline import RankWork
from offload_engine.planning.predict import (
    Costs,
    Prediction,
    Predictor,
    costs_of,
    held_with,
    improving,
    refitted_costs,
    with_busy_ratio,
)
from offload_engine.planning.recompute import options_of, with_recomputation
from offload_engine.planning.shortened import shortened
from offload_engine.planning.steps import Decision, Steps
from offload_engine.schedule import Action

_CURVE_PARTS: Final = 8
"""Of the way from the lowest budget to the one that all fits: in each of them a curve has a decision."""


class Known:
    """Predicts and chooses, for steps of any actions, from one step that was measured with everything offloaded.

    Args:
        job: the measured step, with bytes and times.
        model: model of its memory.
        costs: costs of moves, with the time of that step.
        varied_share: share of the groups' bytes on the device by which steps with one decision may differ.
        recorded: allocations of the measured step, from which those of other steps are replayed; None: not known.
        took_ms: how long each of its actions took; None: not known.
        own: groups of this rank, if they differ from those of `job`.

    Attributes:
        job: see the argument.
        model: corrected by the memory of later steps.
        costs: corrected by the times of later steps.
        varied_share: see the argument.
        took_ms: see the argument.
    """

    def __init__(
        self,
        job: Job,
        model: MemoryModel,
        costs: Costs,
        varied_share: float = 0.0,
        recorded: RecordedStep | None = None,
        took_ms: tuple[float, ...] | None = None,
        own: OwnGroups | None = None,
    ) -> None:
        self.job: Job = job
        self.model: MemoryModel = model
        self.costs: Costs = costs
        self.varied_share: float = varied_share
        self.took_ms: tuple[float, ...] | None = took_ms
        self._recorded = recorded
        self._own = own
        self._steps: dict[tuple[Action, ...], Steps] = {}  # planned and simulated; corrections do not affect them
        self._few: dict[tuple[Action, ...], Steps] = {}  # shortened, by the actions of the whole step

    @no_collections()
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
            found = repredicted(found, self._predictor(steps, model))
            if must_fit and found.floor.held_bytes > budget_bytes:
                raise BudgetError(below_floor_text(budget_bytes, found.floor, self.model))
            return found

        found = None
        if agree is not None and self._recorded is not None and actions == self.job.actions:
            replays = ReplayedChoice(
                self._recorded,
                self.job,
                lambda: self._predictor(steps, self.model),
                budget_bytes - left_bytes,
                agree,
                self._own,
            )
            found = replays.choose(
                lambda wasted_bytes, lacked_bytes: choose_with(
                    self.model.hoping(wasted_bytes), left_bytes + lacked_bytes
                ),
                is_free=recomputed is None,
            )
            self._recorded = self._recorded if replays.is_sound else None
        found = found or choose_with(self.model, guard_bytes + left_bytes)
        return completed(found, self._predictor(steps, self.model))

    def varied_bytes(self, budget_bytes: int) -> int:
        """Return by how many bytes steps may differ at the most that are within a budget."""
        if not self.varied_share:
            return 0
        slots = (slot for stage, shape in enumerate(self.job.shapes) for slot in slots_of(stage, shape.groups))
        nothing_moves = Decision(Choices(frozenset(slots)))
        most = self._steps_of(self.job.actions).planned(nothing_moves).residents.most
        return round(self.varied_share * min(self.model.room_bytes(budget_bytes), most))

    def curve(self, chosen: Chosen, actions: tuple[Action, ...]) -> tuple[Prediction, ...]:
        """Return steps from the floor to one in which nothing moves, each with more memory and less time than before.

        To predict them may take longer than to choose.
        """
        predictor = self._predictor(self._steps_of(actions), self.model)
        known = {each.decision: each for each in (chosen.floor, chosen.top, chosen.best)}
        tried = dict.fromkeys([*chosen.tried, *self._chosen_between(chosen, actions)])
        others = [predictor.completed(predictor.predict(decision)) for decision in tried if decision not in known]
        ratios = predictor.busy_ratio, chosen.busy_ratio
        return improving([*known.values(), *(with_busy_ratio(each, *ratios) for each in others)])

    def _chosen_between(self, chosen: Chosen, actions: tuple[Action, ...]) -> Iterator[Decision]:
        """Choose for budgets between the floor and a step in which nothing moves, unless similar ones were tried."""
        low, high = chosen.floor.held_bytes, chosen.top.held_bytes
        steps = self._steps_of(actions)
        sizes = [held_with(self.model, steps, decision) for decision in chosen.tried]
        budgets = [low + (high - low) * number // _CURVE_PARTS for number in range(1, _CURVE_PARTS + 1)]
        for before, budget in pairwise([low, *budgets]):
            if not any(before < size <= budget for size in sizes):
                yield self.choose(actions, budget, must_fit=False).best.decision

    def _predictor(self, steps: Steps, model: MemoryModel) -> Predictor:
        return Predictor(steps.job, model, self._costs_of(steps), steps)

    def note_excess(self, prediction: Prediction, actions: tuple[Action, ...], excess: Excess) -> Excess:
        """Note what steps of a replayed decision reserve in vain; return what of the excess concerns all decisions."""
        if excess.wasted <= 0 or prediction.decision not in self._steps_of(actions).wasted_bytes:
            return excess
        self.note_wasted(prediction, actions, excess.wasted)
        return Excess(max(0, excess.allocated))

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
        if actions != self.job.actions:
            return None
        steps = self._steps_of(actions)
        costs = refitted_costs(steps.outcome(Decision()), self.costs, chosen.best, chosen.busy_ratio, measured_ms)
        if costs is None:
            return None
        self.costs = costs
        return refitted(chosen, Predictor(self.job, self.model, self.costs, steps))

    def work(self, decision: Decision, busy: float) -> RankWork | None:
        """Return what this rank does in each action of a step like the measured one.

        None if it is not known how much of a step it waits for other ranks.

        Args:
            decision: about the step.
            busy: see `Prediction.busy`.
        """
        floor_ms, waited_ms = self.costs.floor_ms, self.costs.waited_ms
        if floor_ms is None or waited_ms is None:
            return None
        steps = self._steps_of(self.job.actions)
        share = fit(steps.outcome(Decision()), floor_ms, waited_ms).stall_share
        times = steps.outcome(decision).of_actions
        compute = tuple(each.milliseconds - each.stalled_ms for each in times)
        waited = tuple(share * each.stalled_ms for each in times)
        return RankWork(self.job.actions, compute, waited, busy)

    def _costs_of(self, steps: Steps) -> Costs:
        """Return the costs in these steps: the time of the floor was measured with the actions of one step."""
        measured = self._steps_of(self.job.actions)
        if steps is measured:
            return self.costs
        other, floor = (each.outcome(Decision()) for each in (steps, measured))
        return costs_of(other, floor, self.costs)

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
