"""Chooses what to keep, offload and recompute, so that a step fits a budget and is as short as it can be.

A budget is filled in several ways: with room for whatever needs it, with groups that always stay, with both. Each is
simulated, and the shortest step is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from offload_engine.errors import BudgetError
from offload_engine.planning.choices import Choices, Slot
from offload_engine.planning.memory import Job, MemoryModel
from offload_engine.planning.predict import Costs, Decision, Prediction, Predictor
from offload_engine.planning.worth import ms_per_byte, order_to_keep

_CURVE_POINTS: Final = 4
_ROOM_TRIES: Final = 4
_KEPT_SHARES: Final = 2
"""So many shares of what could always stay are tried beside room for the rest."""
_SHARES_RECOMPUTED: Final = (0.25, 0.5, 1.0)
_EQUAL: Final = 1.0005
"""Steps within this ratio take the same time: then the one that moves less is better."""


class Chosen(NamedTuple):
    """What was chosen, and what else could have been."""

    best: Prediction
    floor: Prediction
    """With everything offloaded: the lowest budget that can be reached."""
    top: Prediction
    """With nothing that moves."""
    curve: tuple[Prediction, ...]
    """More memory and less time from each to the next; from the floor to a step in which nothing moves."""


def choose(
    job: Job,
    model: MemoryModel,
    budget_bytes: int,
    costs: Costs,
    *,
    must_fit: bool = True,
    recomputed: frozenset[Slot] | None = None,
) -> Chosen:
    """Choose what becomes of each group.

    Args:
        job: with bytes and times.
        model: of its memory.
        budget_bytes: what the process may hold on its device.
        costs: of moves.
        must_fit: if even the floor does not, raise; else choose the floor.
        recomputed: what is to be recomputed, and nothing else; None: what is best.

    Raises:
        BudgetError: if the budget is below what the step takes with everything offloaded.
    """
    predictor = Predictor(job, model, costs)
    chooser = _Chooser(predictor, recomputed or frozenset())
    others = [] if recomputed is not None else [_Chooser(predictor, each) for each in _recomputable(predictor)]
    curve = chooser.curve()
    floor, top = curve[0], curve[-1]
    if floor.held_bytes > budget_bytes:  # few microbatches in flight may take less than their copies both ways
        floor = min([*curve, *(each.floor() for each in others)], key=lambda each: each.held_bytes)
    if floor.held_bytes > budget_bytes and must_fit:
        raise BudgetError(below_floor_text(budget_bytes, floor.held_bytes, floor.resident_bytes))
    if floor.held_bytes > budget_bytes:
        return Chosen(floor, floor, top, _improving([*curve, floor]))
    if top.held_bytes <= budget_bytes:
        return Chosen(top, floor, top, _improving(curve))
    tried = [*curve, floor]
    if curve[0].held_bytes <= budget_bytes:
        tried += chooser.candidates(budget_bytes)
    if curve[0].held_bytes > budget_bytes or _waits(_best(tried, budget_bytes)):
        tried += [each.with_room(budget_bytes) for each in others]
    return Chosen(_best(tried, budget_bytes), floor, top, _improving(tried))


def _recomputable(predictor: Predictor) -> list[frozenset[Slot]]:
    """Return what could be recomputed: some of what takes less time than its copies, more of it, and all that can."""
    options = sorted(predictor.costs.options, key=lambda option: option.ms_per_byte)
    num_short = sum(option.ms_per_byte < ms_per_byte(predictor) for option in options)
    counts = {max(1, round(share * num_short)) for share in _SHARES_RECOMPUTED if num_short} | {len(options)}
    replaced = [[slot for option in options[:count] for slot in option.replaces] for count in sorted(counts)]
    return [frozenset(slots) for slots in replaced if slots]


def _waits(prediction: Prediction) -> bool:
    return prediction.stalled_ms >= (_EQUAL - 1) * prediction.step_ms


def below_floor_text(budget_bytes: int, floor_bytes: int, group_bytes: int) -> str:
    """Say by how much a budget is too small, and what else would help; `group_bytes` of the floor are of groups."""
    return (
        f"gpu_budget is {_size(budget_bytes)}, {_size(floor_bytes - budget_bytes)} less than the {_size(floor_bytes)} "
        f"of a step with everything offloaded, of which {_size(floor_bytes - group_bytes)} are weights, gradients, "
        "optimizer state and whatever else is not offloaded. Raise the budget, offload or recompute more modules, use "
        "smaller microbatches or shorter sequences, or shard the model further"
    )


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):,.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):,.2f} MiB"


class _Chooser:
    """Tries ways to fill a budget.

    Args:
        predictor: of the steps.
        recomputed: in each of them.
    """

    def __init__(self, predictor: Predictor, recomputed: frozenset[Slot]) -> None:
        self._predictor = predictor
        self._recomputed = recomputed

    def _choices(self, kept: Iterable[Slot] = ()) -> Choices:
        return Choices(frozenset(kept) - self._recomputed, self._recomputed)

    def floor(self) -> Prediction:
        """Predict a step with everything offloaded."""
        return self._predictor.predict(Decision(self._choices()))

    def curve(self) -> list[Prediction]:
        """Predict steps with more and more room, from the floor to one in which nothing moves."""
        top, floor = self._predictor.predict(Decision(self._choices(self._predictor.nbytes))), self.floor()
        grown = top.resident_bytes - floor.resident_bytes
        rooms = (floor.resident_bytes + grown * i // (_CURVE_POINTS + 1) for i in range(1, _CURVE_POINTS + 1))
        return [floor, *(self._predictor.predict(Decision(self._choices(), room)) for room in rooms), top]

    def candidates(self, budget_bytes: int) -> list[Prediction]:
        """Predict steps that fill a budget: with room for whatever needs it, with groups that always stay, with both.

        Room is what compute waits least with: it is used by what is needed next. What always stays costs the host
        nothing.
        """
        kept = self._fill(order_to_keep(self._predictor), budget_bytes)
        counts = sorted({len(kept) * share // _KEPT_SHARES for share in range(_KEPT_SHARES)})
        decisions = [self._with_room(self._choices(kept[:n]), budget_bytes) for n in counts]
        return [self._predictor.predict(decision) for decision in (*decisions, Decision(self._choices(kept)))]

    def with_room(self, budget_bytes: int) -> Prediction:
        """Predict a step with room for whatever needs it."""
        return self._predictor.predict(self._with_room(self._choices(), budget_bytes))

    def _with_room(self, choices: Choices, budget_bytes: int) -> Decision:
        """Give what does not stay as much room as fits a budget; less than the floor takes would be none."""
        least = self._predictor.model.room_bytes(budget_bytes)  # fits wherever groups are at their peak
        low = max(least, self.floor().resident_bytes)
        held = self._predictor.held_bytes(Decision(choices, low))
        if held > budget_bytes:
            return Decision(choices)
        spare = budget_bytes - held  # what more room takes is at most as much, and less where the peak is elsewhere
        for _ in range(_ROOM_TRIES):
            if spare <= 0:
                break
            held = self._predictor.held_bytes(Decision(choices, low + spare))
            low, spare = (low + spare, budget_bytes - held) if held <= budget_bytes else (low, spare // 2)
        return Decision(choices, low)

    def _fill(self, order: Sequence[Slot], budget_bytes: int) -> list[Slot]:
        """Return what can always stay: in order, until the budget is full."""

        def fits(kept: Sequence[Slot]) -> bool:
            return self._predictor.held_bytes(Decision(self._choices(kept))) <= budget_bytes

        low, high = 0, len(order)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(order[:middle]) else (low, middle - 1)
        return list(order[:low])


def _best(predictions: Iterable[Prediction], budget_bytes: int) -> Prediction:
    fitting = [each for each in predictions if each.held_bytes <= budget_bytes]
    fastest = min(each.step_ms for each in fitting)
    equal = [each for each in fitting if each.step_ms <= _EQUAL * fastest]
    return min(equal, key=lambda each: (each.num_moves, each.step_ms, each.held_bytes))


def _improving(predictions: Iterable[Prediction]) -> tuple[Prediction, ...]:
    """Return those that no other beats in both memory and time, by memory."""
    found: list[Prediction] = []
    for each in sorted(predictions, key=lambda each: (each.held_bytes, each.step_ms)):
        if not found or each.step_ms < found[-1].step_ms:
            found.append(each)
    return tuple(found)
