# SPDX-License-Identifier: Apache-2.0
"""`Known`: predicts steps with any decision from one measured step."""

from __future__ import annotations

import dataclasses

from offload_engine.planning.choices import Slot
from offload_engine.planning.choose import Chosen, choose, refitted, remeasured
from offload_engine.planning.memory import Job, MemoryModel
from offload_engine.planning.predict import Costs, Predictor, floor_ms_of, refitted_floor_ms
from offload_engine.planning.recompute import options_of, with_recomputation
from offload_engine.planning.steps import Decision, Steps
from offload_engine.schedule import Action


class Known:
    """Predicts and chooses, for steps of any actions, from one step that was measured with everything offloaded.

    Args:
        job: the measured step, with bytes and times.
        model: model of its memory.
        costs: costs of moves, with the time of that step.
        varied_share: share of the groups' bytes on the device by which steps with one decision may differ.

    Attributes:
        job: see the argument.
        model: corrected by the memory of later steps.
        costs: corrected by the times of later steps.
        varied_share: see the argument.
    """

    def __init__(self, job: Job, model: MemoryModel, costs: Costs, varied_share: float = 0.0) -> None:
        self.job: Job = job
        self.model: MemoryModel = model
        self.costs: Costs = costs
        self.varied_share: float = varied_share
        self._steps: dict[tuple[Action, ...], Steps] = {}  # planned and simulated; corrections do not affect them

    def choose(
        self,
        actions: tuple[Action, ...],
        budget_bytes: int,
        *,
        guard_bytes: int = 0,
        recomputed: frozenset[Slot] | None = None,
        must_fit: bool = True,
    ) -> Chosen:
        """Choose for steps with these actions; see `planning.choose.choose`."""
        steps = self._steps_of(actions)
        return choose(
            steps.job,
            self.model,
            budget_bytes,
            self._costs_of(steps),
            must_fit=must_fit,
            recomputed=recomputed,
            steps=steps,
            guard_bytes=guard_bytes,
        )

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

    def _steps_of(self, actions: tuple[Action, ...]) -> Steps:
        if actions not in self._steps:
            job = dataclasses.replace(self.job, actions=actions)
            self._steps[actions] = Steps(job, self.costs.link, self.costs.options)
        return self._steps[actions]
