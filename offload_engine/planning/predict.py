# SPDX-License-Identifier: Apache-2.0
"""Predicts what a step takes, in memory and time, by what was measured of one in which everything was offloaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeVar

from offload_engine.planning.choices import Choices, Slot, slots_of
from offload_engine.planning.clocks import Link
from offload_engine.planning.fitted import Fit, fit
from offload_engine.planning.frontier import frontier
from offload_engine.planning.memory import Job, MemoryModel
from offload_engine.planning.moves import OUT, GroupKey
from offload_engine.planning.recompute import RecomputeOption
from offload_engine.planning.shapes import group_keys
from offload_engine.planning.slowed import MOST_SLOWER, factor_of, slowed_ms, slower_of, unslowed_ms
from offload_engine.planning.steps import Decision, Outcome, Steps

_LEAST_BUSY: Final = 1 / 8
LEAST_CLOCK_RATIO: Final = 0.75
"""The lowest ratio that clocks explain."""
LEAST_BUSY_RATIO: Final = 0.5
"""The lowest ratio of steps. When a training begins, its experts soon share their tokens evenly, so ranks wait less for
each other than in the step that was measured. (0.6 on two H200s, three steps later.)"""


class Prediction(NamedTuple):
    """What a step takes under a decision."""

    decision: Decision
    held_bytes: int
    """The most bytes that the process holds on its device."""
    resident_bytes: int
    """Largest number of bytes of groups on the device."""
    step_ms: float
    exposed_ms: dict[str, float]
    """How long compute waits for the copies of groups, by their name."""
    moved_bytes: dict[str, int]
    """Bytes copied out in a step, by name of group, like the next two."""
    kept_bytes: dict[str, int]
    recomputed_bytes: dict[str, int]
    num_moves: int
    """Groups copied out in a step."""
    busy: float = 0.0
    """Share of the floor's waits for copies that this step avoids."""
    overhead_bytes: int = 0
    """Of `held_bytes`, those besides the peak of allocated bytes."""
    arena_bytes: int | None = None
    """Of the arena that is reserved before the step; None: not known."""
    hidden_ms: float = 0.0
    """See `slowed_ms`. 0 if it is not known: see `Predictor.completed`."""
    host_ms: float = 0.0
    """Host time of its moves. No part of `step_ms`: it delays a step only where the device waits for the host."""

    @property
    def cost_ms(self) -> float:
        """Return by what decisions are compared: of two that take as long, the one that moves less is better."""
        return self.step_ms + self.host_ms

    @property
    def allocated_bytes(self) -> int:
        """Return the peak of allocated bytes."""
        return self.held_bytes - self.overhead_bytes

    @property
    def stalled_ms(self) -> float:
        """Return how long compute waits for copies."""
        return sum(self.exposed_ms.values())


@dataclass(frozen=True)
class Costs:
    """Costs of moving and recomputing."""

    link: Link = Link()
    host_us: float = 50.0
    """Host time to copy one group out and in. (44 and 88 on hosts of H200s.)"""
    options: tuple[RecomputeOption, ...] = ()
    floor_ms: float | None = None
    """Measured time of a step in which everything was offloaded; None: as simulated."""
    waited_ms: float | None = None
    """How long compute waited for copies in it, if this rank also waits for others, in a pipeline. None: not known."""
    busy_ratio: float = 1.0
    """How much longer compute takes if it never waits for copies than if everything is offloaded: a GPU that idles less
    clocks lower. (Dense, 8 layers, one H200: 870 ms against 764, where a third of the floor is waits.)"""


class Predictor:
    """Predicts the steps of one job, each decision once.

    Args:
        job: with bytes and times.
        model: of its memory.
        costs: costs of moves.
        steps: steps of this job with this link and these options that were planned before; None: none.

    Attributes:
        steps: planned and simulated steps.
        nbytes: bytes of each slot, for one microbatch.
        most_busy_ratio: the largest `Costs.busy_ratio` by which no step that waits less takes longer than the floor.
        busy_ratio: ratio of the costs, which may be of other steps, or the largest.
    """

    def __init__(self, job: Job, model: MemoryModel, costs: Costs, steps: Steps | None = None) -> None:
        self.steps: Steps = steps or Steps(job, costs.link, costs.options)
        self.job: Job = job
        self.model: MemoryModel = model
        self.costs: Costs = costs
        self._predictions: dict[Decision, Prediction] = {}
        self._fit = Fit(1.0)
        self._floor_stalled_ms = 0.0  # as simulated
        self.most_busy_ratio = self.busy_ratio = 1.0
        self._slots = [slots_of(stage, shape.groups) for stage, shape in enumerate(job.shapes)]
        self.nbytes: dict[Slot, int] = {
            slot: group.nbytes
            for slots, shape in zip(self._slots, job.shapes, strict=True)
            for slot, group in zip(slots, shape.groups, strict=True)
        }
        self._calibrate(self.steps.outcome(Decision()))

    def predict(self, decision: Decision) -> Prediction:
        """Predict a step, by a simulation."""
        if decision not in self._predictions:
            self._predictions[decision] = self._predict(decision)
        return self._predictions[decision]

    def _predict(self, decision: Decision) -> Prediction:
        outcome = self.steps.outcome(decision)
        busy = max(0.0, 1.0 - outcome.stalled_ms / self._floor_stalled_ms) if self._floor_stalled_ms else 0.0
        is_hiding = self.busy_ratio != 1.0 and busy >= _LEAST_BUSY and outcome.stalled_ms
        hidden_ms = self._hidden_ms(decision) if is_hiding else 0.0
        job, plan, residents = self.steps.planned(decision)
        moved = [move.group for _, move in plan.moves() if move.op is OUT]
        return Prediction(
            decision,
            self.held_bytes(decision),
            residents.most,
            slowed_ms(self._simulated_ms(outcome), hidden_ms, factor_of(self.busy_ratio, busy)),
            summed((label.partition(" ")[2], milliseconds) for label, milliseconds in outcome.stalls.items()),
            *self._bytes_of(job, decision.choices, moved),
            num_moves=len(moved),
            busy=busy,
            overhead_bytes=self.model.overhead_with(residents, self.steps.wasted_with(decision)),
            arena_bytes=self.steps.arena_bytes.get(decision),
            hidden_ms=hidden_ms,
            host_ms=len(moved) * self.costs.host_us / 1e3,
        )

    def completed(self, prediction: Prediction) -> Prediction:
        """Return a prediction of this predictor with `hidden_ms`, which a ratio of 1 needs not."""
        if prediction.hidden_ms or prediction.busy < _LEAST_BUSY or not prediction.stalled_ms:
            return prediction
        return prediction._replace(hidden_ms=self._hidden_ms(prediction.decision))

    def _hidden_ms(self, decision: Decision) -> float:
        fast, slow = (self._simulated_ms(self.steps.outcome(decision, slower)) for slower in (1.0, MOST_SLOWER))
        return max(0.0, fast - slow) / (MOST_SLOWER - 1.0)

    def _simulated_ms(self, outcome: Outcome) -> float:
        return max(0.0, self._fit.step_ms(outcome))

    def _calibrate(self, floor: Outcome) -> None:
        self._floor_stalled_ms = floor.stalled_ms
        if self.costs.floor_ms is not None:
            self._fit = fit(floor, self.costs.floor_ms, self.costs.waited_ms)
        floor_ms = self._fit.step_ms(floor)
        if floor_ms > 0:
            waited_ms = self._fit.scale * self._fit.stall_share * self._floor_stalled_ms
            self.most_busy_ratio = 1.0 + waited_ms / floor_ms
        self.busy_ratio = min(self.costs.busy_ratio, self.most_busy_ratio)

    def _bytes_of(
        self, job: Job, choices: Choices, moved: Sequence[GroupKey]
    ) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        """Return the bytes that a step moves, keeps and recomputes, by name of group."""
        away = set(moved)
        keys = group_keys(job.actions, job.shapes)
        sizes = [(key, job.shapes[key.chunk.stage].groups[key.index]) for key in keys]
        recomputed = [
            (slot.name, self.nbytes[slot] - group.nbytes)
            for key, group in sizes
            if (slot := self.slot_of(key)) in choices.recomputed and group.nbytes < self.nbytes[slot]
        ]
        return (
            summed((group.name, group.nbytes) for key, group in sizes if key in away),
            summed((group.name, group.nbytes) for key, group in sizes if key not in away),
            summed(recomputed),
        )

    def slot_of(self, group: GroupKey) -> Slot:
        """Return the slot of a group."""
        return self._slots[group.chunk.stage][group.index]

    def held_bytes(self, decision: Decision, wasted_bytes: int | None = None) -> int:
        """Predict the most bytes that the process holds, without a simulation.

        Args:
            decision: of the step.
            wasted_bytes: that it reserves in vain; None: as far as that is known.
        """
        return held_with(self.model, self.steps, decision, wasted_bytes)


def costs_of(other: Outcome, floor: Outcome, costs: Costs) -> Costs:
    """Return the costs in steps of other actions, from the measurement of one step.

    The same share of the simulated waits is real, and the time that is not simulated grows with the compute.

    Args:
        other: simulated step of the other actions, with everything offloaded.
        floor: simulated step of the measured actions, with everything offloaded.
        costs: in steps of the measured actions.
    """
    if costs.floor_ms is None:
        return costs
    fitted = fit(floor, costs.floor_ms, costs.waited_ms)
    grown = other.busy_ms / floor.busy_ms if floor.busy_ms else 1.0
    floor_ms = fitted._replace(rest_ms=grown * fitted.rest_ms).step_ms(other)
    waited_ms = None if costs.waited_ms is None else fitted.stall_share * other.stalled_ms
    return replace(costs, floor_ms=floor_ms, waited_ms=waited_ms)


def refitted_costs(
    floor: Outcome, costs: Costs, prediction: Prediction, busy_ratio: float, measured_ms: float
) -> Costs | None:
    """Return costs by which a step takes less than measured with everything offloaded, if a later step shows that.

    The measured step may have been delayed, which affects all predictions. Only time that no simulation explains is
    subtracted, unless the later step waits for copies as long.

    Args:
        floor: simulated step, with everything offloaded.
        costs: with its measured time.
        prediction: prediction of the later step from these.
        busy_ratio: ratio that it was predicted with; see `Costs`.
        measured_ms: time of the later step.
    """
    if costs.floor_ms is None:
        return None
    over_ms = _unslowed_ms(prediction, busy_ratio) - measured_ms
    if prediction.busy >= _LEAST_BUSY:
        over_ms = min(over_ms, costs.floor_ms - fit(floor, costs.floor_ms, costs.waited_ms).work_ms(floor))
    return None if over_ms <= 0 else replace(costs, floor_ms=costs.floor_ms - over_ms)


def held_with(model: MemoryModel, steps: Steps, decision: Decision, wasted_bytes: int | None = None) -> int:
    """Predict the most bytes that the process holds under a decision; see `Predictor.held_bytes`."""
    job, _, residents = steps.planned(decision)
    share = model.early_share(job, decision.choices)
    return model.held_with(residents, share, steps.wasted_with(decision) if wasted_bytes is None else wasted_bytes)


def improving(predictions: Iterable[Prediction]) -> tuple[Prediction, ...]:
    """Return the predictions that no other beats in both memory and time, ordered by memory."""
    return frontier(predictions, lambda each: (each.held_bytes, each.step_ms))


def with_busy_ratio(prediction: Prediction, before: float, after: float) -> Prediction:
    """Return a prediction for another ratio; see `Costs`."""
    milliseconds = _unslowed_ms(prediction, before)
    return prediction._replace(step_ms=slowed_ms(milliseconds, prediction.hidden_ms, factor_of(after, prediction.busy)))


def _unslowed_ms(prediction: Prediction, busy_ratio: float) -> float:
    """Return how long a step would take if compute were as fast as with everything offloaded."""
    return unslowed_ms(prediction.step_ms, prediction.hidden_ms, factor_of(busy_ratio, prediction.busy))


def measured_busy_ratio(prediction: Prediction, before: float, measured_ms: float, most: float) -> float:
    """Return the ratio with which a step is predicted as long as measured; see `Costs`.

    Args:
        prediction: prediction of the step, with the ratio `before`.
        before: returned if the step waits for copies as long as the floor, and so shows nothing about other steps.
        measured_ms: time of the step.
        most: see `Predictor.most_busy_ratio`. A step that took longer was delayed by something else, which must not
            count against groups that stay.
    """
    if prediction.busy < _LEAST_BUSY:
        return before
    slower = slower_of(_unslowed_ms(prediction, before), prediction.hidden_ms, measured_ms)
    ratio = 1.0 + (slower - 1.0) / prediction.busy
    return min(max(ratio, LEAST_BUSY_RATIO), most)


K = TypeVar("K")
N = TypeVar("N", int, float)


def summed(items: Iterable[tuple[K, N]]) -> dict[K, N]:
    """Add up the numbers of equal keys."""
    found: dict[K, N] = {}
    for key, number in items:
        # mypyc takes the sum of two of them for any number.
        found[key] = found[key] + number if key in found else number  # type: ignore[assignment, unused-ignore]
    return found
