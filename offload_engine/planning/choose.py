"""Chooses what to keep, offload and recompute, so that a step fits a budget and is as short as it can be.

Groups are put in an order of what they are worth for their bytes at the peak, and kept in that order until the budget
is full. Several such choices are simulated, and the shortest is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple, TypeVar

from offload_engine.errors import BudgetError
from offload_engine.planning.choices import Choices, Slot, slots_of
from offload_engine.planning.clocks import Link
from offload_engine.planning.memory import Job, MemoryModel
from offload_engine.planning.moves import OUT, GroupKey
from offload_engine.planning.plan import Plan
from offload_engine.planning.planner import plan_step
from offload_engine.planning.recompute import RecomputeOption, with_recomputation
from offload_engine.planning.residents import groups_before, resident_before
from offload_engine.planning.shapes import group_keys
from offload_engine.planning.simulate import PipelineJob, RankJob, simulate

_CURVE_POINTS: Final = 4
_ROOM_TRIES: Final = 4
_KEPT_SHARES: Final = 2
"""So many shares of what could always stay are tried beside room for the rest."""
_SHARES_RECOMPUTED: Final = (0.25, 0.5, 1.0)
_EQUAL: Final = 1.0005
"""Steps within this ratio take the same time: then the one that moves less is better."""
_GIB: Final = 1 << 30


class Decision(NamedTuple):
    """What a step does about its memory."""

    choices: Choices = Choices()
    resident_bytes: int | None = None
    """Of groups on the device, by which all others stay as long as there is room; None: they leave as early as they
    can, and come back as late."""


class Prediction(NamedTuple):
    """What a step takes with some decision."""

    decision: Decision
    held_bytes: int
    """What the process holds on its device at the most."""
    resident_bytes: int
    """Of groups on the device at the most."""
    step_ms: float
    exposed_ms: dict[str, float]
    """How long compute waits for the copies of groups, by their name."""
    moved_bytes: dict[str, int]
    """Copied out in a step, by name of group; as the next two."""
    kept_bytes: dict[str, int]
    recomputed_bytes: dict[str, int]
    num_moves: int
    """Groups copied out in a step."""

    @property
    def stalled_ms(self) -> float:
        """Return how long compute waits for copies."""
        return sum(self.exposed_ms.values())


class Chosen(NamedTuple):
    """What was chosen, and what else could have been."""

    best: Prediction
    floor: Prediction
    """With everything offloaded: the lowest budget that can be reached."""
    curve: tuple[Prediction, ...]
    """More memory and less time from each to the next; from the floor to a step in which nothing moves."""


@dataclass(frozen=True)
class Costs:
    """What moving and recomputing cost."""

    link: Link = Link()
    host_us: float = 25.0
    """Of the host, to copy a group out and in."""
    options: tuple[RecomputeOption, ...] = ()
    floor_ms: float | None = None
    """Measured, of a step in which everything was offloaded; None: as simulated."""


def choose(job: Job, model: MemoryModel, budget_bytes: int, costs: Costs, *, must_fit: bool = True) -> Chosen:
    """Choose what becomes of each group.

    Args:
        job: with bytes and times.
        model: of its memory.
        budget_bytes: what the process may hold on its device.
        costs: of moves.
        must_fit: if even the floor does not, raise; else choose the floor.

    Raises:
        BudgetError: if the budget is below what the step takes with everything offloaded.
    """
    chooser = _Chooser(job, model, costs)
    floor = chooser.predict(Decision())
    if floor.held_bytes > budget_bytes and must_fit:
        raise BudgetError(below_floor_text(budget_bytes, floor.held_bytes, floor.resident_bytes))
    curve = chooser.curve(floor)
    if floor.held_bytes > budget_bytes:
        return Chosen(floor, floor, _improving(curve))
    if curve[-1].held_bytes <= budget_bytes:
        return Chosen(curve[-1], floor, _improving(curve))
    tried = [*curve, *chooser.candidates(floor, budget_bytes)]
    tried += chooser.recomputing(_best(tried, budget_bytes), floor, budget_bytes)
    return Chosen(_best(tried, budget_bytes), floor, _improving(tried))


def below_floor_text(budget_bytes: int, floor_bytes: int, group_bytes: int) -> str:
    """Say by how much a budget is too small, and what else would help; `group_bytes` of the floor are of groups."""
    other_bytes = floor_bytes - group_bytes
    return (
        f"gpu_budget is {budget_bytes / _GIB:,.2f} GiB, {(floor_bytes - budget_bytes) / _GIB:,.2f} GiB less than "
        f"the {floor_bytes / _GIB:,.2f} GiB of a step with everything offloaded, of which {other_bytes / _GIB:,.2f} "
        "GiB are weights, gradients, optimizer state and whatever else is not offloaded. Raise the budget, offload or "
        "recompute more modules, use smaller microbatches or shorter sequences, or shard the model further"
    )


class _Chooser:
    """Predicts choices, each once."""

    def __init__(self, job: Job, model: MemoryModel, costs: Costs) -> None:
        self._job, self._model, self._costs = job, model, costs
        self._predictions: dict[Decision, Prediction] = {}
        self._floor_ms = 0.0  # as simulated
        self._slots = [slots_of(stage, shape.groups) for stage, shape in enumerate(job.shapes)]
        self._nbytes = {
            slot: group.nbytes
            for slots, shape in zip(self._slots, job.shapes, strict=True)
            for slot, group in zip(slots, shape.groups, strict=True)
        }

    # -- predictions -------------------------------------------------------------------------------------------------

    def predict(self, decision: Decision) -> Prediction:
        """Predict a step, by a simulation."""
        found = self._predictions.get(decision)
        if found is None:
            found = self._predictions[decision] = self._simulate(decision)
        return found

    def _simulate(self, decision: Decision) -> Prediction:
        job, choices = self._job_with(decision), decision.choices
        plan = plan_step(job.actions, job.shapes, job.bounds, choices=choices, is_combined=job.is_combined)
        rank = RankJob(job.actions, job.shapes, job.bounds)
        [outcome] = simulate(PipelineJob((rank,), self._costs.link), [plan]).ranks
        if not self._predictions:
            self._floor_ms = outcome.milliseconds
        measured = self._floor_ms if self._costs.floor_ms is None else self._costs.floor_ms
        residents = resident_before(job.actions, job.shapes, job.bounds, plan)
        moved = [move.group for _, move in plan.moves() if move.op is OUT]
        return Prediction(
            decision,
            self._model.held_with(residents, self._model.early_share(job, choices)),
            max(residents.values(), default=0),
            max(0.0, measured + outcome.milliseconds - self._floor_ms),
            _summed((label.partition(" ")[2], milliseconds) for label, milliseconds in outcome.stalls.items()),
            *self._bytes_of(job, choices, moved),
            num_moves=len(moved),
        )

    def _job_with(self, decision: Decision) -> Job:
        recomputed = [option for option in self._costs.options if option.replaces <= decision.choices.recomputed]
        shapes = with_recomputation(self._job.shapes, recomputed)
        return replace(self._job, shapes=shapes).within(decision.resident_bytes)

    def _bytes_of(
        self, job: Job, choices: Choices, moved: Sequence[GroupKey]
    ) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        """Return the bytes that a step moves, keeps and recomputes, by name of group."""
        away = set(moved)
        keys = group_keys(job.actions, job.shapes)
        sizes = [(key, job.shapes[key.chunk.stage].groups[key.index]) for key in keys]
        recomputed = [
            (slot.name, self._nbytes[slot]) for key in keys if (slot := self._slot_of(key)) in choices.recomputed
        ]
        return (
            _summed((group.name, group.nbytes) for key, group in sizes if key in away),
            _summed((group.name, group.nbytes) for key, group in sizes if key not in away),
            _summed(recomputed),
        )

    def _slot_of(self, group: GroupKey) -> Slot:
        return self._slots[group.chunk.stage][group.index]

    def _held_bytes(self, decision: Decision) -> int:
        return self._model.held_bytes(self._job_with(decision), decision.choices)

    # -- what to keep first ------------------------------------------------------------------------------------------

    def order(self, floor: Prediction) -> list[Slot]:
        """Return the groups that move when everything is offloaded, in the order in which to keep them.

        First what is worth most for its bytes at the peak: the time of the host, and of its copies as far as they are
        exposed. Bytes that are not there at the peak, or would be there anyway, count nothing. Among equals the layers
        whose backward comes first, whose copies have the least time.
        """
        num_moves = self._num_moves()
        worth = self._worth(floor, num_moves)
        costs = self._peak_costs()
        late = sorted(num_moves, key=lambda slot: (-slot.stage, -self._slots[slot.stage].index(slot)))
        return sorted(late, key=lambda slot: -worth[slot] / max(costs[slot], 1))

    def _num_moves(self) -> dict[Slot, int]:
        """Count the copy-outs of each slot that moves, when everything is offloaded."""
        return _summed((self._slot_of(move.group), 1) for _, move in self._plan(Choices()).moves() if move.op is OUT)

    def _plan(self, choices: Choices) -> Plan:
        job = self._job
        return plan_step(job.actions, job.shapes, job.bounds, choices=choices, is_combined=job.is_combined)

    def _worth(self, floor: Prediction, num_moves: Mapping[Slot, int]) -> dict[Slot, float]:
        """Return how many ms a step gains by keeping each slot."""
        copy_ms = {slot: count * self._nbytes[slot] * self._ms_per_byte for slot, count in num_moves.items()}
        total = sum(copy_ms.values())
        exposed = min(1.0, floor.stalled_ms / total) if total else 0.0
        host_ms = self._costs.host_us / 1e3
        return {slot: count * host_ms + exposed * copy_ms[slot] for slot, count in num_moves.items()}

    @property
    def _ms_per_byte(self) -> float:
        link = self._costs.link
        return (1 / link.out_gbps + 1 / link.in_gbps) / 1e6

    def _peak_costs(self) -> dict[Slot, int]:
        """Return how much the peak would grow by keeping each slot: at the peak of a step that keeps all, or none."""
        job = self._job
        plans = [self._plan(choices) for choices in (Choices(), self._all_kept())]
        costs = dict.fromkeys(self._nbytes, 0)
        for plan in plans:
            peak = self._model.peak_boundary(resident_before(job.actions, job.shapes, job.bounds, plan))
            if peak is None:
                continue
            none, every = (groups_before(job.actions, job.shapes, job.bounds, each, peak) for each in plans)
            growth = _summed((slot := self._slot_of(group), self._nbytes[slot]) for group in every - none)
            costs |= {slot: max(costs[slot], nbytes) for slot, nbytes in growth.items()}
        return costs

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _all_kept(self) -> Choices:
        return Choices(frozenset(self._nbytes))

    def curve(self, floor: Prediction) -> list[Prediction]:
        """Predict steps with more and more room, from the floor to one in which nothing moves."""
        top = self.predict(Decision(self._all_kept()))
        grown = top.resident_bytes - floor.resident_bytes
        rooms = (floor.resident_bytes + grown * i // (_CURVE_POINTS + 1) for i in range(1, _CURVE_POINTS + 1))
        return [floor, *(self.predict(Decision(resident_bytes=room)) for room in rooms), top]

    def candidates(self, floor: Prediction, budget_bytes: int) -> list[Prediction]:
        """Predict steps that fill a budget: with room for whatever needs it, with groups that always stay, with both.

        Room is what compute waits least with: it is used by what is needed next. What always stays costs the host
        nothing.
        """
        kept = self._fill(self.order(floor), budget_bytes)
        counts = sorted({len(kept) * share // _KEPT_SHARES for share in range(_KEPT_SHARES)})
        decisions = [self._with_room(Choices(frozenset(kept[:n])), floor, budget_bytes) for n in counts]
        return [self.predict(decision) for decision in (*decisions, Decision(Choices(frozenset(kept))))]

    def _with_room(self, choices: Choices, floor: Prediction, budget_bytes: int) -> Decision:
        """Give what does not stay as much room as fits a budget; less than the floor takes would be none."""
        low = self._model.room_bytes(budget_bytes)
        if low < floor.resident_bytes:
            return Decision(choices)
        high = max(low, self._alive_bytes)
        for _ in range(_ROOM_TRIES):
            middle = (low + high) // 2
            fits = self._held_bytes(Decision(choices, middle)) <= budget_bytes
            low, high = (middle, high) if fits else (low, middle)
        return Decision(choices, low)

    @cached_property
    def _alive_bytes(self) -> int:
        return max(self._job.residents(self._all_kept()).values(), default=0)

    def _fill(self, order: Sequence[Slot], budget_bytes: int) -> list[Slot]:
        """Return what can always stay: in order, until the budget is full."""

        def fits(kept: Sequence[Slot]) -> bool:
            return self._held_bytes(Decision(Choices(frozenset(kept)))) <= budget_bytes

        low, high = 0, len(order)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(order[:middle]) else (low, middle - 1)
        return list(order[:low])

    def recomputing(self, best: Prediction, floor: Prediction, budget_bytes: int) -> list[Prediction]:
        """Predict steps that recompute what costs less to recompute than to copy, where compute waits for copies."""
        if best.stalled_ms < (_EQUAL - 1) * best.step_ms:
            return []
        options = [option for option in self._costs.options if option.ms_per_byte < self._ms_per_byte]
        options.sort(key=lambda option: option.ms_per_byte)
        counts = sorted({max(1, round(share * len(options))) for share in _SHARES_RECOMPUTED}) if options else []
        replaced = [frozenset(slot for option in options[:n] for slot in option.replaces) for n in counts]
        return [self.predict(self._with_room(Choices(recomputed=each), floor, budget_bytes)) for each in replaced]


K = TypeVar("K")
N = TypeVar("N", int, float)


def _summed(items: Iterable[tuple[K, N]]) -> dict[K, N]:
    found: dict[K, N] = {}
    for key, number in items:
        found[key] = found[key] + number if key in found else number
    return found


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
