# SPDX-License-Identifier: Apache-2.0
"""`BudgetController`: measures a step, decides what may be on the device, and holds that within a budget."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from offload_engine._budget.decide import Decider, correct_if_shorter, excess_of, has_outgrown
from offload_engine._budget.first import decide_first
from offload_engine._budget.floor import FloorSteps
from offload_engine._budget.gauge import ResidentGauge
from offload_engine._budget.hold import HoldWatch
from offload_engine._budget.idleness import Idleness
from offload_engine._budget.in_force import InForce
from offload_engine._budget.last_step import LastStep
from offload_engine._budget.margin import Margin, budget_bytes, check_held
from offload_engine._budget.measure import MeasuringRecorder
from offload_engine._budget.state import State, check_following
from offload_engine._budget.summary import Measured
from offload_engine._budget.verify import Verifier
from offload_engine._budget.view import BudgetView
from offload_engine._devices.base import MemoryGauge
from offload_engine._policy.keeping import Keeping
from offload_engine._policy.planned import PlannedPolicy
from offload_engine._policy.policy import Policy
from offload_engine._saved.counters import ByteCounters
from offload_engine._saved.transfers import TransferContext
from offload_engine.errors import BudgetError
from offload_engine.planning.choices import Allowance
from offload_engine.planning.memory import Excess
from offload_engine.planning.saved_plan import SavedPlan
from offload_engine.schedule import Action
from offload_engine.stats import IterationStats

logger = logging.getLogger(__name__)

_MAX_TRIES: Final = 8
"""To measure a step whose chunks can be planned."""
_WINDOW_STEPS: Final = 50
_OPTIMIZED: Final = 2
"""Steps after which optimizers have their state, which no arena of a given plan has room for."""
_TIMED_STEPS: Final = 4
"""Of a plan that was given, the first ones, which its table shows. To time a step waits for the device."""
_US: Final = 1e3
"""Of a millisecond."""


class BudgetController(BudgetView):
    """Decides for one engine, between its iterations. While a decision holds, it costs about 50 microseconds a step.

    Args:
        budget_bytes: what the process may hold on its device; None: all that is there, less a margin.
        context: of the engine: its device and copy streams.
        policy: of the engine, made by `Planned`.
        keeping: told what to keep.
        gauge: measures what the process holds.

    Attributes:
        is_idle: the running step, or the last one, needs no groups: see `Idleness`. One in each window has them.
    """

    def __init__(
        self, budget_bytes: int | None, context: TransferContext, policy: Policy, keeping: Keeping, gauge: MemoryGauge
    ) -> None:
        assert isinstance(policy, PlannedPolicy)
        self.is_idle: bool = False
        # Where copies are threads, the time of their completion is random.
        is_early_certain = not isinstance(gauge, ResidentGauge)
        self._margin = Margin(gauge.total_bytes()) if budget_bytes is None else None
        nbytes = budget_bytes or (0 if self._margin is None else self._margin.budget_bytes())
        decider = Decider(nbytes, context, policy, is_early_certain=is_early_certain)
        super().__init__(decider, LastStep(context.device, gauge))
        self._recorder: MeasuringRecorder | None = None
        self._verifier, self._idleness = Verifier(decider), Idleness(is_early_certain)
        self._floor = FloorSteps(self._margin)
        self._num_steps = self._num_tries = 0
        self._has_trimmed = False  # for the first decision
        self._in_force = InForce(decider, keeping, self._last)
        self._hold = HoldWatch(decider, self._in_force, self._last)

    # -- the engine calls --------------------------------------------------------------------------------------------

    def begin(self, actions: Sequence[Action], is_combined: bool) -> MeasuringRecorder | None:
        """Decide about the iteration that begins; returns its recorder if it is to be measured.

        Raises:
            BudgetError: if the budget is below what a step takes with everything offloaded.
        """
        if not self._num_steps:
            check_held(self.decider.budget_bytes, self._gauge)
        self._last.measure()
        with self.planning(self.state is not State.HOLD):
            self._decide(actions, is_combined)
        if self.state is not State.HOLD:
            self.num_planning_steps += 1
            self._gauge.reset()
        is_watched = self.state is not State.HOLD or self._num_steps % _WINDOW_STEPS == 0
        self.is_idle = not is_watched and self._idleness.allows(self.decider.chosen, self.decider.budget_bytes)
        self._num_steps += 1
        self._forget_recorder()
        if self.state is State.MEASURE:
            self._recorder = MeasuringRecorder(self._last.device, self._gauge)
            self.decider.runs.notes = self._recorder.allocation_notes
        self._last.begin(not self.is_settled or (self.decider.chosen is None and self._num_steps <= _TIMED_STEPS))
        return self._recorder

    def _decide(self, actions: Sequence[Action], is_combined: bool) -> None:
        if self._num_steps and self._has_ended_everywhere():
            self._conclude(is_combined)
        if self.state in (State.VERIFY, State.HOLD) and self.decider.known is not None:
            if not self.decider.is_decided(tuple(actions)):
                self._in_force.allow(self.decider.decide(tuple(actions), is_alone=True))

    def start_with(self, saved: SavedPlan | None, source: str) -> None:
        """Begin with a decision that was made before, instead of measuring; it is watched like any other.

        Every rank that agrees with others calls this; if one has no decision that fits, all measure.

        Args:
            saved: to begin with; not used if it takes more than the budget. None: this rank has none.
            source: where it comes from.
        """
        allowance = self.decider.take(saved, source)
        if allowance is not None:
            self._in_force.allow(allowance)
            self.state = State.HOLD  # may have been set already, by another plan

    @property
    def has_begun(self) -> bool:
        """Return whether an iteration has begun."""
        return self._num_steps > 0

    def end(self, stats: IterationStats, num_chunks: int) -> None:
        """Note what the finished iteration took; see `LastStep.end`."""
        self._last.end(stats, num_chunks)
        self._idleness.note(self._last.chunk_bytes)
        if self.state in (State.FLOOR, State.MEASURE):
            self._floor.note(self._last)

    def abandon(self) -> None:
        """Forget the running iteration, which has raised. Idempotent."""
        self._last.has_ended = False
        self._forget_recorder()

    def close(self) -> None:
        """Stop watching optimizers and allocations, and return the arena if nothing is in it. Idempotent."""
        self._floor.optimizers.close()
        self._forget_recorder()
        self._gauge.trim()

    def _forget_recorder(self) -> None:
        recorder, self._recorder, self.decider.runs.notes = self._recorder, None, None
        if recorder is not None:
            recorder.allocations()  # or the allocator would record for ever

    def _has_ended_everywhere(self) -> bool:
        """Return whether the last step ended on each rank that now agrees with this one."""
        is_window_over = self._num_steps % _WINDOW_STEPS == 0  # at the same step on every rank
        is_met = not self.is_settled or is_window_over or self.decider.is_unchecked
        if not is_met:
            return self._last.has_ended
        [was_abandoned] = self.decider.meet((int(not self._last.has_ended),))
        return not was_abandoned

    # -- from state to state -----------------------------------------------------------------------------------------

    def _go(self, to: State) -> None:
        check_following(self.state, to)
        self.state = to

    def _conclude(self, is_combined: bool) -> None:
        """Draw conclusions from the last step."""
        self.decider.check_taken()
        if self.state is State.FLOOR:
            self._conclude_floor()
        elif self.state is State.HOLD:
            if self._num_steps == _OPTIMIZED and self.decider.chosen is None:
                self._in_force.clear_allocator()
            if not (self._times.num_awaited and self._changes_by_its_time()):
                self._watch()
        elif self.state is State.VERIFY:
            self._verify()
        elif self._in_force.settle():
            self._conclude_measuring(is_combined)

    def _conclude_floor(self) -> None:
        """Trim once optimizers have their state: memory that steps reserve in vain from then on is lasting.

        One more step comes before the measured one: in it host memory may be consolidated, and the allocator reserves
        what it needs.
        """
        if self._floor.has_state:
            self._floor.note_time(self._last)
            return self._go(State.MEASURE)
        has_state = self._floor.optimizers.has_state(self._num_steps)
        [lacks_state] = self.decider.meet((int(not has_state),))  # on a rank
        if not lacks_state:
            self._floor.begin_state()
            self._gauge.trim()

    def _conclude_measuring(self, is_combined: bool) -> None:
        recorder = self._recorder
        assert recorder is not None
        self._num_tries += 1
        self._floor.note_time(self._last)
        if self.decider.learn(recorder, self._gauge, self._floor, is_combined):
            self._decide_first()
        elif self._num_tries >= _MAX_TRIES:
            logger.warning("gpu_budget: no step could be planned, so everything stays offloaded: chunks differ")
            self.decider.give_up()
            self._go(State.HOLD)

    def _decide_first(self) -> None:
        """Decide by the measurement; bytes in the allocator from before the training must not count."""
        if self._margin is not None:
            [negative] = self.decider.agree((-self._margin.budget_bytes(),))
            self.decider.budget_bytes = -negative
        try:
            allowance = decide_first(self.decider)
        except BudgetError:
            if self._has_trimmed:
                raise
            self._has_trimmed = True
            return self._gauge.trim()  # to measure again
        self._num_tries = 0
        self._verifier.begin()
        self._in_force.allow(allowance)
        self._in_force.clear_allocator()  # the blocks of fully offloaded steps would fit badly
        self._go(State.VERIFY)

    def _verify(self) -> None:
        """Compare the step with its prediction, and correct the model if it was over the budget."""
        last = self._last
        self.measured = Measured(last.held_bytes(), last.peak_bytes, last.milliseconds)
        grown = has_outgrown(self.decider, last.chunk_bytes)
        own = excess_of(self.decider, self.measured.held_bytes, last.peak_bytes)
        numbers = own.total, own.wasted, int(grown), round(_US * last.milliseconds)
        total, wasted, is_outgrown, measured_us = self.decider.agree(numbers)
        if is_outgrown:
            return self._measure_again("activations have grown")
        was_settled = self._in_force.settle()
        excess = Excess(total - wasted, wasted)
        if self._verifier.settles(self.decider.actions, excess, is_planned=was_settled):
            correct_if_shorter(self.decider, measured_us / _US)
        elif not was_settled:
            return self._in_force.clear_allocator()  # the blocks of groups that no plan knew would fit badly
        elif self._verifier.fits(excess):
            return None
        allowance = self._verifier.judge(excess)
        if allowance is None:
            self._gauge.reset()
            self._times.begin()
            self._go(State.HOLD)
            return self.log()
        self._in_force.allow(allowance)
        self._in_force.clear_allocator()  # the blocks of the previous decision would fit badly

    def _changes_by_its_time(self) -> bool:
        """Correct times by the first steps that hold; return whether another decision is in force by them."""
        [measured_us] = self.decider.agree((round(_US * self._last.milliseconds),))
        milliseconds = self._times.note(measured_us / _US)
        if milliseconds is None:
            return False
        self.measured = self.measured._replace(milliseconds=milliseconds)
        self.decider.correct_time(milliseconds)
        allowance = self._verifier.reconsider()
        if allowance is not None:
            self._in_force.allow(allowance)
            self._in_force.clear_allocator()
            self._go(State.VERIFY)
        return allowance is not None

    def _watch(self) -> None:
        """Keep less at once where a step went over the budget, more where it was well below for long."""
        step_ms = self._last.milliseconds if self.decider.chosen is None else self.measured.milliseconds
        self.measured = Measured(self._last.held_bytes(), self._last.peak_bytes, step_ms)
        self._hold.wants_measure |= has_outgrown(self.decider, self._last.chunk_bytes)
        is_window_over = self._num_steps % _WINDOW_STEPS == 0
        if (is_window_over or self.decider.is_alone) and self.decider.agree((int(self._hold.wants_measure),)) != (0,):
            return self._measure_again("activations have grown")
        # Of the finished step: a decision made now may unsettle the next one.
        was_settled = self._in_force.settle()
        if is_window_over:
            self._hold.use_what_is_left()
        if was_settled:
            self._hold.answer(self.measured.held_bytes, is_window_over)

    def _measure_again(self, why: str) -> None:
        self._hold.wants_measure = False
        self._times.end()
        self._floor.forget()
        logger.info("gpu_budget: %s, so one more step is measured with everything offloaded", why)
        self._gauge.trim()
        self._in_force.allow(Allowance())
        self._go(State.MEASURE)


def make_budget(
    gpu_budget: int | str | None, context: TransferContext, policy: Policy, keeping: Keeping, counters: ByteCounters
) -> BudgetController | None:
    """Make the controller of an engine; None without a budget. The budget "auto" is measured.

    If the device does not report its memory, the resident bytes of `counters` stand for it.

    Raises:
        ValueError: if the budget is above the memory of the device, or depends on it where it is not known.
    """
    if gpu_budget is None:
        return None
    gauge = context.device.memory or ResidentGauge(counters)
    return BudgetController(budget_bytes(gpu_budget, gauge), context, policy, keeping, gauge)
