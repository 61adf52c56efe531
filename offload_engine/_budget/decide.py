# SPDX-License-Identifier: Apache-2.0
"""`Decider`: makes the decisions of one engine, from its measurements."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Final

from offload_engine._budget.agreement import (
    Agree,
    agreed_link,
    agreed_numbers,
    agreed_options,
    are_alike,
    most_of,
    text_of_shapes,
)
from offload_engine._budget.allowing import TOLERANCE, allowance_of
from offload_engine._budget.floor import FloorSteps
from offload_engine._budget.known import Known
from offload_engine._budget.learn import Learned, learned
from offload_engine._budget.link import measure_link
from offload_engine._budget.measure import MeasuringRecorder
from offload_engine._budget.module_runs import ModuleRuns
from offload_engine._budget.own_groups import OwnGroups
from offload_engine._budget.stages import Stages
from offload_engine._budget.summary import saved_of
from offload_engine._budget.taken import TakenPlan, take
from offload_engine._devices.base import MemoryGauge
from offload_engine._policy.planned import PlannedPolicy
from offload_engine._saved.transfers import TransferContext
from offload_engine.errors import BudgetError
from offload_engine.planning.choices import Allowance, Choices, Slot
from offload_engine.planning.choose import Chosen, retimed
from offload_engine.planning.clocks import Link
from offload_engine.planning.memory import Excess, Job
from offload_engine.planning.pipeline import RankWork
from offload_engine.planning.predict import LEAST_CLOCK_RATIO, Costs, Prediction, measured_busy_ratio
from offload_engine.planning.recompute import RecomputeOption
from offload_engine.planning.saved_plan import SavedPlan
from offload_engine.planning.shapes import Shapes, largest_bytes
from offload_engine.schedule import Action

logger = logging.getLogger(__name__)

_LINK_BYTES: Final = 32 << 20
_WORTH_A_CHANGE: Final = 0.96
"""Share of the time of the decision in force that another one may take, to replace it. Times of steps that were not
measured are predicted within 3%: of three that were to save 2% to 3.5% on an H200, one did."""
_WASTED_SHARE: Final = 3 / 10
"""Share of what the floor has reserved in vain by which another decision may hold more than predicted. (22 budgets on
an H200: 0.26, 0.21 and less.)"""


class Decider:
    """Owns the model of one engine's memory and time, and the decisions made by it.

    Args:
        budget_bytes: what the process may hold on its device.
        context: device and streams.
        policy: has the shapes of chunks.
        is_early_certain: see `make_memory_model`.

    Attributes:
        budget_bytes: what the process may hold on its device.
        agree: returns the largest of each number over the ranks that must decide alike; every rank calls it at the same
            time, with as many numbers. The default is one rank.
        agree_all: the same over all ranks that wait for each other in a step, until all have decided for the first
            time; None: these are the ranks of `agree`.
        start_together: called right before the link is measured, when all ranks are ready.
        stages: times steps in a pipeline.
        find_options: returns what the model can recompute, given the shapes of its chunks.
        apply: called with each decision between two steps, to make the model recompute what was chosen.
        chosen: the decision in force, and its alternatives; None before the first.
        actions: the actions that it was made for.
        guard_bytes: bytes of the budget that the prediction of a decision must leave free.
        known: what a measured step has shown; None before the measurement.
        expected_ratio: see `Costs.busy_ratio`; holds until steps have shown another one.
        runs: notes the modules that could be recomputed.
    """

    def __init__(
        self, budget_bytes: int, context: TransferContext, policy: PlannedPolicy, is_early_certain: bool
    ) -> None:
        self.budget_bytes: int = budget_bytes
        self.agree: Agree = tuple
        self.agree_all: Agree | None = None
        self.stages: Stages = Stages()
        self.start_together: Callable[[], None] = lambda: None
        self.find_options: Callable[[Shapes], tuple[RecomputeOption, ...]] = lambda shapes: ()
        self.apply: Callable[[Choices], None] = lambda choices: None
        self.chosen: Chosen | None = None
        self.guard_bytes: int = 0
        self.known: Known | None = None
        self.runs: ModuleRuns = ModuleRuns()
        self._context = context
        self._policy = policy
        self._is_early_certain = is_early_certain
        self._taken: TakenPlan | None = None  # to begin with
        self._is_checked = self._has_given_up = False
        self.expected_ratio: float = 1.0
        self._busy_ratio: float | None = None  # as measured last
        self._left_bytes = 0  # beside the guard: a margin common to all ranks, whatever one has decided alone
        self._decisions: dict[tuple[Action, ...], Chosen] = {}
        self.actions: tuple[Action, ...] = ()

    @property
    def extra_bytes(self) -> int:
        """Return the bytes that the process holds besides its peak of allocated bytes, under the decision in force."""
        return 0 if self.chosen is None else self.chosen.best.overhead_bytes

    @property
    def margin_bytes(self) -> int:
        """Return by how many bytes steps with the decision in force may differ, as known now."""
        if self.known is None or self.chosen is None:
            return 0
        return round(self.known.varied_share * self.chosen.best.resident_bytes)

    @property
    def is_alone(self) -> bool:
        """Return whether there is no other rank to agree with."""
        return self.agree is tuple

    @property
    def meet(self) -> Agree:
        """Return how to agree now: with all ranks until each has decided, later with those that decide alike."""
        has_decided = self.chosen is not None or self._is_checked
        return self.agree if has_decided or self.agree_all is None else self.agree_all

    @property
    def is_at_floor(self) -> bool:
        """Return whether everything is offloaded, or recomputed, because no less fits or nothing is known."""
        return self._has_given_up or (
            self.chosen is not None and self.chosen.best.decision == self.chosen.floor.decision
        )

    @property
    def saved(self) -> SavedPlan | None:
        """Return the decision in force, or the one to begin with; None without one."""
        if self.chosen is None:
            return None if self._taken is None else self._taken.saved
        return saved_of(self.chosen, self._shapes(), self.actions)

    def join(self, agree: Agree, agree_all: Agree, place: tuple[int, int] = (0, 1)) -> None:
        """Decide together with other ranks, within the smallest budget of those that decide alike. Each rank calls it.

        Args:
            agree: see `Decider`.
            agree_all: see `Decider`.
            place: rank and number of ranks of the pipeline.
        """
        self.agree, self.agree_all, self.stages = agree, agree_all, Stages(*place)
        [negative] = agree((-self.budget_bytes,))
        self.budget_bytes = -negative

    def take(self, saved: SavedPlan | None, source: str) -> Allowance | None:
        """Begin with a decision that was made before; None if it takes more than the budget, or a rank has another."""
        taken = take(saved, source, self.budget_bytes, self.agree, self.meet)
        self._taken = taken or self._taken  # one that was taken before stays in force, and is to be checked
        return None if taken is None else taken.saved.allowance

    @property
    def is_unchecked(self) -> bool:
        """Return whether the decision to begin with has yet to be checked against this model."""
        return self._taken is not None and not self._is_checked

    def check_taken(self) -> None:
        """Check, when groups are known, that the decision to begin with is for this model.

        Raises:
            ValueError: if not; names where it comes from. On the other ranks, too.
        """
        if self._taken is not None and self.is_unchecked:
            self._taken.check(self._policy.slots(), self.meet)
            self._is_checked = True

    def learn(self, recorder: MeasuringRecorder, gauge: MemoryGauge, floor: FloorSteps, is_combined: bool) -> bool:
        """Learn the model from a step that was measured with everything offloaded.

        Args:
            recorder: of the step; blocks until the device has come to its end.
            gauge: not reset since the step ended.
            floor: other steps like it.
            is_combined: each forward runs together with the next backward.

        Returns:
            Whether it could be made: not where the chunks of one virtual stage differ, or lack a backward.
        """
        actions, meet = tuple(recorder.actions()), self.meet
        shapes = self._policy.shapes(actions)
        [cannot] = meet((int(not are_alike(self.agree, text_of_shapes(shapes)) or shapes is None),))
        if shapes is None or cannot:
            return False
        job = Job(actions, shapes, self._policy.own_bounds, is_combined)
        found = learned(job, recorder, gauge, self.agree, self._is_early_certain)
        link = _measured_link(self, found, meet)
        options = agreed_options(self.agree, self.find_options(found.job.shapes))
        floor_ms, varied_share = agreed_numbers(self.agree, floor.milliseconds, floor.varied_share)
        waited_ms = found.waited_ms if self.stages.is_pipeline else None
        costs = Costs(link, options=options, floor_ms=floor_ms, waited_ms=waited_ms)
        self.expected_ratio = self.stages.expected_ratio(self._context.device.busy_ratio)
        own = _own_groups(self, found, options)
        known = Known(found.job, found.model, costs, varied_share, found.recorded, found.took_ms, own)
        self.know(known, round(_WASTED_SHARE * found.wasted_bytes))
        return True

    def know(self, known: Known, guard_bytes: int) -> None:
        """Decide by `known` from now on; earlier decisions are void.

        Args:
            known: the same on all ranks that decide alike.
            guard_bytes: of the budget, that a decision is to leave.
        """
        self.known, self.guard_bytes, self._left_bytes = known, guard_bytes, known.varied_bytes(self.budget_bytes)
        self._decisions.clear()

    def give_up(self) -> None:
        """Decide nothing any more: no step can be planned. What was decided before is void."""
        self._is_checked |= self.chosen is not None  # what has been decided once meets its own ranks only
        self.known = self.chosen = self._taken = None
        self._decisions.clear()
        self._has_given_up = True

    def correct(self, excess: Excess) -> None:
        """Correct the model by an excess of steps over their prediction; earlier decisions are void."""
        assert self.known is not None
        self.known.model = self.known.model.corrected(excess)
        self._left_bytes = self.margin_bytes
        self._decisions.clear()

    def take_in(self, excess: Excess) -> None:
        """Correct the model by an excess of steps over their prediction. The decision stays; predictions change.

        If steps hold less, only the prediction of this decision changes: the others are upper bounds.
        """
        assert self.chosen is not None and self.known is not None
        held, overhead = self.chosen.best.held_bytes + excess.total, self.extra_bytes + excess.wasted
        self.correct(excess if excess.total > 0 else Excess())
        self.chosen = self.known.remeasured(self.chosen, self.actions, held, overhead)
        self._decisions[self.actions] = self.chosen

    def level(self) -> bool:
        """Take over the largest figures of the ranks that decide alike; return whether one had others."""
        model = None if self.known is None else self.known.model
        own = (model.correction_bytes, model.overhead_bytes, self.margin_bytes) if model else (0, 0, 0)
        most, are_equal = most_of(self.agree, own)
        if not are_equal:
            self.correct(Excess(most[0] - own[0], most[1] - own[1]))
            self._left_bytes = most[2]
        return not are_equal

    def correct_time(self, measured_ms: float) -> None:
        """Correct the times by a step of the decision in force. The decision stays; all predictions change."""
        known = self.known
        assert self.chosen is not None and known is not None
        ratio = self.stages.busy_ratio(measured_ms, self.chosen, work_of(self, self.chosen))
        if ratio is None:
            found = known.refit(self.chosen, self.actions, measured_ms)
            if found is not None:
                self.chosen, self._decisions = found, {self.actions: found}
            before, most = self.chosen.busy_ratio, self.chosen.most_busy_ratio
            ratio = measured_busy_ratio(self.chosen.best, before, measured_ms, most)
        self._busy_ratio, known.costs = ratio, dataclasses.replace(known.costs, busy_ratio=ratio)
        self._decisions = {actions: retimed(each, ratio) for actions, each in self._decisions.items()}
        self.chosen = timed(self, self._decisions[self.actions])

    def reconsider(self) -> Allowance | None:
        """Decide again by corrected times; None if that saves too little for two more steps of verifying."""
        if self.chosen is None:
            return None
        found = timed(self, _choose(self, self.actions, None, is_alone=False))
        if not _may_replace(self, found, self.chosen):
            return None
        self.chosen = self._decisions[self.actions] = found
        return allowance_of(found, self._shapes(), self.actions)

    def decide(self, actions: tuple[Action, ...] = (), *, is_alone: bool = False) -> Allowance:
        """Decide about steps with these actions, or with the measured ones.

        Args:
            actions: of the steps; empty: as measured.
            is_alone: other ranks may not decide, or may decide otherwise: recomputation stays as it is, because several
                ranks recompute together.

        Raises:
            BudgetError: in the first decision, if the budget is below the floor. Later ones choose the floor.
        """
        assert self.known is not None
        self.actions = actions or self.known.job.actions
        found = self._decisions.get(self.actions)
        if found is None:
            is_alone &= not self.is_alone
            recomputed = recomputed_by(self.chosen) if is_alone else None
            found = _with_ratio(self, _choose(self, self.actions, recomputed, is_alone))
            self._decisions[self.actions] = found
        self.chosen = timed(self, found)
        return allowance_of(found, self._shapes(), self.actions)

    def is_decided(self, actions: tuple[Action, ...]) -> bool:
        """Return whether the decision in force is for steps of these actions, or these cannot be planned."""
        return not actions or actions == self.actions or self._policy.shapes(actions) is None

    def _shapes(self) -> Shapes:
        return () if self.known is None else self.known.job.shapes


def _measured_link(decider: Decider, found: Learned, meet: Agree) -> Link:
    def start() -> None:
        meet((0,))  # until all ranks are about to copy
        decider.start_together()

    context = decider._context
    streams = context.copy_out_stream, context.copy_in_stream
    nbytes = min(_LINK_BYTES, max(1, largest_bytes(found.job.shapes)))
    link = measure_link(context.device, streams, nbytes, start)
    return agreed_link(decider.agree, link, found.copied_share)


def _own_groups(decider: Decider, found: Learned, agreed: tuple[RecomputeOption, ...]) -> OwnGroups | None:
    """Return the groups of this rank; None if they have the bytes on which all ranks agree, and free as many."""
    options = decider.find_options(found.own_job.shapes) if agreed else ()
    free_alike = [option.freed_bytes for option in options] == [option.freed_bytes for option in agreed]
    return None if found.are_own and free_alike else OwnGroups(found.own_job, found.own_model, options)


def _choose(
    decider: Decider, actions: tuple[Action, ...], recomputed: frozenset[Slot] | None, is_alone: bool
) -> Chosen:
    """Choose for steps with these actions; a first decision raises if the budget is below the floor."""
    known, guards = decider.known, (decider.guard_bytes, decider._left_bytes)
    assert known is not None
    agree = None if is_alone or not _know_alike(decider) else decider.agree
    try:
        return known.choose(actions, decider.budget_bytes, *guards, recomputed=recomputed, agree=agree)
    except BudgetError as error:
        if decider.saved is None:
            raise
        logger.warning("%s", error)
        return known.choose(actions, decider.budget_bytes, recomputed=recomputed, must_fit=False)


def _with_ratio(decider: Decider, found: Chosen) -> Chosen:
    """Return a choice by costs without a ratio with the one that was measured before, or is expected."""
    if found.busy_ratio != 1.0:
        return found
    measured = decider._busy_ratio
    if measured is None or not (decider.is_alone or measured >= LEAST_CLOCK_RATIO):  # tells only of its measured step
        measured = decider.expected_ratio
    return retimed(found, measured)


def _know_alike(decider: Decider) -> bool:
    """Return whether the ranks that decide alike have all they decide by in common: one may have corrected it alone."""
    known = decider.known
    assert known is not None
    model, costs = known.model, known.costs
    own = model.correction_bytes, model.overhead_bytes, decider.margin_bytes, costs.busy_ratio, costs.floor_ms
    return are_alike(decider.agree, f"{own}")


def timed(decider: Decider, chosen: Chosen) -> Chosen:
    """Return a choice for the actions in force with its time in the pipeline, if that is known."""
    return decider.stages.timed(chosen, work_of(decider, chosen))


def step_ms_of(decider: Decider, prediction: Prediction) -> float:
    """Return how long a step takes that could be decided instead; in a pipeline, with alike decisions of all stages."""
    chosen = decider.chosen
    assert chosen is not None
    saved_ms, most_ms = (chosen.floor.step_ms - each.step_ms for each in (prediction, chosen.best))
    share = min(1.0, max(0.0, saved_ms / most_ms)) if most_ms > 0 else 1.0
    work = work_of(decider, chosen._replace(best=prediction))
    milliseconds = decider.stages.milliseconds(work, chosen.busy_ratio, share)
    return prediction.step_ms if milliseconds is None else milliseconds


def work_of(decider: Decider, chosen: Chosen) -> RankWork | None:
    """Return what this rank does by a choice; None if it is not for steps like the measured one."""
    known = decider.known
    if known is None or decider.actions != known.job.actions:
        return None
    return known.work(chosen.best.decision, chosen.best.busy)


def _may_replace(decider: Decider, found: Chosen, chosen: Chosen) -> bool:
    """Return whether a choice is worth the change. In a pipeline, blocks of other stages last in an arena."""
    outgrows = decider.stages.is_pipeline and (found.best.arena_bytes or 0) > (chosen.best.arena_bytes or 0)
    is_worth_it = found.step_ms <= _WORTH_A_CHANGE * chosen.step_ms
    # What clocks do not explain was different in the measured step, and would be in another decision's steps.
    is_explained = decider.is_alone or chosen.busy_ratio >= LEAST_CLOCK_RATIO
    may_replace = is_worth_it and is_explained and not outgrows  # on this rank: each has its own arena
    is_alike = _know_alike(decider)
    [is_refused] = decider.agree((int(not may_replace),))
    return is_alike and not is_refused


def correct_chosen(decider: Decider, excess: Excess) -> None:
    """Correct the model by an excess of steps of the decision in force, which all ranks that decide alike have seen."""
    known, chosen = decider.known, decider.chosen
    assert known is not None and chosen is not None
    decider.correct(known.note_excess(chosen.best, decider.actions, excess))


def correct_if_shorter(decider: Decider, measured_ms: float) -> None:
    """Correct the times by a step that may be delayed, because it or that of another rank reserves memory."""
    assert decider.chosen is not None
    if measured_ms < decider.chosen.step_ms:
        decider.correct_time(measured_ms)


def recomputed_by(chosen: Chosen | None) -> frozenset[Slot]:
    """Return what a decision recomputes; nothing without one."""
    return frozenset() if chosen is None else chosen.best.decision.choices.recomputed


def has_outgrown(decider: Decider, chunk_bytes: float) -> bool:
    """Return whether chunks save more than measured, so that all other memory may have grown, too."""
    if decider.known is None or not chunk_bytes:  # no groups were opened
        return False
    measured = decider.known.chunk_bytes(decider.chosen)
    return bool(measured) and chunk_bytes > TOLERANCE * sum(measured) / len(measured)


def excess_of(decider: Decider, held_bytes: int, peak_bytes: int) -> Excess:
    """Return by how much a step of the decision in force exceeded its prediction.

    Args:
        decider: has the decision.
        held_bytes: by the process, at the most.
        peak_bytes: allocated, at the most.
    """
    assert decider.chosen is not None
    wasted = held_bytes - peak_bytes - decider.extra_bytes
    return Excess(held_bytes - decider.chosen.best.held_bytes - wasted, wasted)
