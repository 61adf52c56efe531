# SPDX-License-Identifier: Apache-2.0
"""Chooses what to keep, offload and recompute, so that a step fits a budget and is as short as it can be.

A budget is filled in several ways: with room for whatever needs it, with groups that always stay, with both. Each is
simulated, and the shortest step is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, NamedTuple

from offload_engine.errors import BudgetError
from offload_engine.planning.by_name import kept_beside_names
from offload_engine.planning.choices import Choices, Slot
from offload_engine.planning.memory import Job, MemoryModel
from offload_engine.planning.predict import Costs, Prediction, Predictor, held_with, improving, with_busy_ratio
from offload_engine.planning.recompute import RecomputeOption, cheapest_first, evenly, first_layers, recomputing
from offload_engine.planning.steps import Decision, Steps
from offload_engine.planning.worth import ms_per_byte, order_to_keep, peak_costs
from offload_engine.sizes import fine_size

_CURVE_POINTS: Final = 4
_ROOM_TRIES: Final = 2
_WORTH_A_TRY: Final = 1 / 128
"""Share of a budget: less is not worth another plan, since few groups are as small."""
_KEPT_SHARES: Final = 2
"""How many shares of the groups that could always stay are tried, each with room for the rest."""
_SHARES_RECOMPUTED: Final = (0.25, 0.5, 0.75, 1.0)
_SHARE_STEPS: Final = (0.125, 0.0625)  # distances from the best share at which more are tried, in both directions
_EQUAL: Final = 1.0005
"""Steps within this ratio take the same time: then the one that moves less is better."""

_Part = Callable[[Collection[RecomputeOption], float], list[RecomputeOption]]


class Chosen(NamedTuple):
    """What was chosen, and its alternatives."""

    best: Prediction
    floor: Prediction
    """The lowest budget that can be reached: with everything offloaded, or recomputed where that takes less."""
    top: Prediction
    """The step in which nothing moves."""
    tried: tuple[Decision, ...]
    """Decisions that no other one beats in both memory and time, ordered by memory: a curve is drawn through them."""
    busy_ratio: float = 1.0
    """The ratio with which these times are predicted; see `Costs`."""
    most_busy_ratio: float = 1.0
    """See `Predictor.most_busy_ratio`."""
    pipeline_ms: float | None = None
    """How long a step of the best takes in a pipeline whose other stages may be slower; None: not known."""

    @property
    def step_ms(self) -> float:
        """Return how long a step of the best takes."""
        return self.best.step_ms if self.pipeline_ms is None else self.pipeline_ms


def choose(
    job: Job,
    model: MemoryModel,
    budget_bytes: int,
    costs: Costs,
    *,
    must_fit: bool = True,
    recomputed: frozenset[Slot] | None = None,
    steps: Steps | None = None,
    guard_bytes: int = 0,
) -> Chosen:
    """Choose for each group whether it is kept, offloaded or recomputed.

    Args:
        job: the job, with bytes and times.
        model: model of its memory.
        budget_bytes: bytes that the process may hold on its device.
        costs: costs of moves.
        must_fit: raise if even the floor does not fit; otherwise the floor is chosen then.
        recomputed: exactly what to recompute; None: what is best.
        steps: steps of this job with this link and these options that were planned before; None: none.
        guard_bytes: bytes of the budget to leave free, unless even the floor does not.

    Raises:
        BudgetError: if the budget is below what the step takes with everything offloaded, or recomputed.
    """
    predictor = Predictor(job, model, costs, steps)
    ratios = predictor.busy_ratio, predictor.most_busy_ratio
    chooser = _Chooser(predictor, budget_bytes - guard_bytes, recomputed)
    curve = chooser.curve()
    everything, top = curve[0], curve[-1]
    floor = min([everything, *chooser.all_recomputed()], key=lambda each: each.held_bytes)
    if floor.held_bytes > budget_bytes:  # few microbatches in flight may take less memory than their copies both ways
        floor = min([floor, *curve], key=lambda each: each.held_bytes)
    if floor.held_bytes > budget_bytes:
        if must_fit:
            raise BudgetError(below_floor_text(budget_bytes, floor, model))
        return Chosen(floor, floor, top, _improving([*curve, floor]), *ratios)
    limit = chooser.limit_bytes = max(budget_bytes - guard_bytes, floor.held_bytes)
    if top.held_bytes <= limit:
        return Chosen(top, floor, top, _improving([*curve, floor]), *ratios)
    tried = [*curve, floor]
    if everything.held_bytes <= limit:
        tried += chooser.candidates()
    tried += chooser.recomputing(_best(tried, limit))
    return Chosen(_best(tried, limit), floor, top, _improving(tried), *ratios)


def remeasured(chosen: Chosen, held_bytes: int, overhead_bytes: int, model: MemoryModel, steps: Steps) -> Chosen:
    """Return a choice with the memory of a corrected model.

    Args:
        chosen: the choice so far.
        held_bytes: measured with the best step.
        overhead_bytes: of these, besides the peak of allocated bytes.
        model: corrected by this measurement.
        steps: steps of the job.
    """

    def again(prediction: Prediction) -> Prediction:
        return prediction._replace(held_bytes=held_with(model, steps, prediction.decision))

    best = chosen.best._replace(held_bytes=held_bytes, overhead_bytes=overhead_bytes)
    floor, top = (best if each.decision == best.decision else again(each) for each in (chosen.floor, chosen.top))
    return chosen._replace(best=best, floor=floor, top=top)


def refitted(chosen: Chosen, predictor: Predictor) -> Chosen:
    """Return a choice with the times of a predictor that was fitted to another time of the floor."""

    def again(prediction: Prediction) -> Prediction:
        return prediction._replace(step_ms=predictor.predict(prediction.decision).step_ms)

    best, floor, top = again(chosen.best), again(chosen.floor), again(chosen.top)
    ratios = predictor.busy_ratio, predictor.most_busy_ratio
    return Chosen(best, floor, top, chosen.tried, *ratios)


def repredicted(chosen: Chosen, predictor: Predictor) -> Chosen:
    """Return what was chosen for a step as predicted for another one, with the same chunks."""
    best, floor, top = (predictor.predict(each.decision) for each in (chosen.best, chosen.floor, chosen.top))
    return Chosen(best, floor, top, chosen.tried, predictor.busy_ratio, predictor.most_busy_ratio)


def completed(chosen: Chosen, predictor: Predictor) -> Chosen:
    """Return a choice whose times another ratio can correct; see `Predictor.completed`."""
    best, floor, top = map(predictor.completed, (chosen.best, chosen.floor, chosen.top))
    return chosen._replace(best=best, floor=floor, top=top)


def retimed(chosen: Chosen, busy_ratio: float) -> Chosen:
    """Return a choice with the times of another ratio; see `Costs.busy_ratio`."""

    ratio = min(busy_ratio, chosen.most_busy_ratio)

    def again(prediction: Prediction) -> Prediction:
        return with_busy_ratio(prediction, chosen.busy_ratio, ratio)

    best, floor, top = again(chosen.best), again(chosen.floor), again(chosen.top)
    return chosen._replace(best=best, floor=floor, top=top, busy_ratio=ratio, pipeline_ms=None)


def below_floor_text(budget_bytes: int, lowest: Prediction, model: MemoryModel) -> str:
    """Return a text that says by how much a budget is too small, and what else would help."""
    floor_bytes = lowest.held_bytes
    how = "offloaded, and recomputed where possible" if lowest.recomputed_bytes else "offloaded"
    if model.has_groups_alone:
        rest, more = " (saved tensors in use or being copied; without a GPU nothing else counts)", "recompute"
    else:
        other = fine_size(floor_bytes - lowest.resident_bytes)
        rest = f", of which {other} are weights, gradients, optimizer state and other memory that is not offloaded"
        more = "offload or recompute"
    has, lacks, takes = map(fine_size, (budget_bytes, floor_bytes - budget_bytes, floor_bytes))
    return (
        f"gpu_budget is {has}, {lacks} less than the {takes} of a step "
        f"with everything {how}{rest}. Raise the budget, {more} more modules, use smaller microbatches or "
        "shorter sequences, or shard the model further"
    )


class _Chooser:
    """Tries ways to fill a budget.

    Args:
        predictor: predicts the steps.
        limit_bytes: bytes of the budget to fill.
        recomputed: exactly what each step recomputes; None: what is best.
    """

    def __init__(self, predictor: Predictor, limit_bytes: int, recomputed: frozenset[Slot] | None) -> None:
        self._predictor = predictor
        self.limit_bytes: int = limit_bytes
        self._is_free = recomputed is None
        self._recomputed = recomputed or frozenset()
        self._floor = predictor.predict(Decision(self._choices()))

    def _choices(self, kept: Iterable[Slot] = ()) -> Choices:
        return Choices(frozenset(kept) - self._recomputed, self._recomputed)

    def curve(self) -> list[Prediction]:
        """Predict steps with more and more room, from the floor to one in which nothing moves."""
        top = self._predictor.predict(Decision(self._choices(self._predictor.nbytes)))
        least, grown = self._floor.resident_bytes, top.resident_bytes - self._floor.resident_bytes
        rooms = (least + grown * i // (_CURVE_POINTS + 1) for i in range(1, _CURVE_POINTS + 1))
        return [self._floor, *(self._predictor.predict(Decision(self._choices(), room)) for room in rooms), top]

    def candidates(self) -> list[Prediction]:
        """Predict steps that fill the budget: with room for any group, with groups that always stay, with both.

        With room compute waits least, because the group that is needed next uses it. Groups that always stay, by their
        worth or all but those of some names, cost the host no time.
        """
        costs = peak_costs(self._predictor)
        kept = self._fill(order_to_keep(self._predictor, costs))
        beside = kept_beside_names(self._predictor, self.limit_bytes, costs, self._recomputed)
        counts = sorted({len(kept) * share // _KEPT_SHARES for share in range(_KEPT_SHARES)})
        decisions = [self._with_room(self._choices(kept[:n])) for n in counts]
        whole = [Decision(self._choices(each)) for each in (kept, beside) if each is not None]
        return [self._predictor.predict(decision) for decision in (*decisions, *whole)]

    def _with_room(self, choices: Choices) -> Decision:
        """Give groups that do not stay as much room as fits the budget, and at least that of the floor."""
        least = self._floor.resident_bytes
        low = max(self._predictor.model.room_bytes(self.limit_bytes), least)  # fits wherever groups are at their peak
        held = self._held_bytes(choices, low)
        if held > self.limit_bytes and choices.recomputed:  # recomputed bytes are on the device as well
            low = max(least, low - (held - self.limit_bytes))
            held = self._held_bytes(choices, low)
        if held > self.limit_bytes:
            return Decision(choices)
        spare = self.limit_bytes - held  # more room takes at most as much, and less where the peak is elsewhere
        for _ in range(_ROOM_TRIES):
            if spare < _WORTH_A_TRY * self.limit_bytes:
                break
            held = self._held_bytes(choices, low + spare)
            is_in = held <= self.limit_bytes
            low, spare = (low + spare, self.limit_bytes - held) if is_in else (low, spare // 2)
        return Decision(choices, low)

    def _held_bytes(self, choices: Choices, room: int) -> int:
        return self._predictor.held_bytes(Decision(choices, room))

    def _fill(self, order: Sequence[Slot]) -> list[Slot]:
        """Return the groups that can always stay: in order, until the budget is full."""

        def fits(kept: Sequence[Slot]) -> bool:
            return self._predictor.held_bytes(Decision(self._choices(kept))) <= self.limit_bytes

        low, high = 0, len(order)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(order[:middle]) else (low, middle - 1)
        return list(order[:low])

    def all_recomputed(self) -> list[Prediction]:
        """Predict the step that recomputes all it can and offloads the rest, if anything can be recomputed."""
        choices = recomputing(cheapest_first(self._predictor.costs.options)) if self._is_free else Choices()
        return [self._predictor.predict(Decision(choices))] if choices else []

    def recomputing(self, best: Prediction) -> list[Prediction]:
        """Predict steps that recompute groups, where compute waits for copies, if that costs less than to copy them."""
        if best.stalled_ms < (_EQUAL - 1) * best.step_ms and not best.decision.choices.recomputed:
            return []
        limit = float("inf") if self._floor.held_bytes > self.limit_bytes else ms_per_byte(self._predictor)
        found = cheapest_first(self._predictor.costs.options) if self._is_free else []
        options = [option for option in found if option.ms_per_byte < limit]
        return self._recomputing(options) if options else []

    def _recomputing(self, options: Sequence[RecomputeOption]) -> list[Prediction]:
        """Predict steps that recompute some shares of the options, spread both ways, and more around the best one."""

        def of_share(part: _Part, share: float) -> Prediction:
            return self._predictor.predict(self._with_room(recomputing(part(options, share))))

        tried = [(part, share) for part in (evenly, first_layers) for share in _SHARES_RECOMPUTED]
        found = {each: of_share(*each) for each in tried}
        for step in _SHARE_STEPS:
            part, share = min(found, key=lambda each: self._rank(found[each]))
            for other in (share - step, share + step):
                if 0 < other <= 1 and (part, other) not in found:
                    found[part, other] = of_share(part, other)
        return list(found.values())

    def _rank(self, each: Prediction) -> tuple[bool, float]:
        return each.held_bytes > self.limit_bytes, each.cost_ms


def _best(predictions: Iterable[Prediction], budget_bytes: int) -> Prediction:
    fitting = [each for each in predictions if each.held_bytes <= budget_bytes]
    least = min(each.cost_ms for each in fitting)
    equal = [each for each in fitting if each.cost_ms <= _EQUAL * least]
    return min(equal, key=lambda each: (each.num_moves, each.step_ms, each.held_bytes))


def _improving(predictions: Iterable[Prediction]) -> tuple[Decision, ...]:
    return tuple(each.decision for each in improving(predictions))
