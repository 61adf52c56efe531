"""`BudgetController`: measures a step, decides what may be on the device, and holds that within a budget.

    FLOOR -> MEASURE -> VERIFY -> HOLD
               ^---------------------'     what a step does has changed

FLOOR and MEASURE offload everything. VERIFY runs as decided, and corrects the model of memory by what it finds.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections.abc import Callable, Sequence
from typing import Final

from offload_engine._budget.gauge import ResidentGauge
from offload_engine._budget.link import measure_link
from offload_engine._budget.measure import MeasuringRecorder
from offload_engine._budget.optimizers import OptimizerWatch
from offload_engine._budget.times import with_times
from offload_engine._devices.base import Device, MemoryGauge, TimeMark
from offload_engine._policy.executor import Executor
from offload_engine._policy.planned import PlannedPolicy
from offload_engine.errors import BudgetError
from offload_engine.planning.choices import Allowance, Slot, slots_of
from offload_engine.planning.choose import Chosen, Costs, Prediction, choose
from offload_engine.planning.clocks import Link
from offload_engine.planning.memory import Job, MeasuredMemory, MemoryModel, make_memory_model
from offload_engine.planning.recompute import RecomputeOption
from offload_engine.planning.shapes import Shapes, largest_bytes
from offload_engine.schedule import Action
from offload_engine.stats import IterationStats

logger = logging.getLogger(__name__)

_MAX_CORRECTIONS: Final = 3
_MAX_WAIT_STEPS: Final = 64
"""For an optimizer to step: gradients may be accumulated over many iterations."""
_TOLERANCE: Final = 9 / 8
"""A group may grow by so much, as routing gives experts now more, now fewer tokens."""
_CLOSE: Final = 1 / 256
"""Of the budget: a prediction this close to what is measured is right."""
_WINDOW_STEPS: Final = 50
_UNUSED: Final = 1 / 32
"""Of the budget: if as much was left for a whole window, more is kept."""
_LINK_BYTES: Final = 32 << 20


class State(enum.Enum):
    """What the next step is for; see above for the order."""

    FLOOR = enum.auto()
    """An optimizer has yet to step: everything is offloaded."""
    MEASURE = enum.auto()
    """Everything is offloaded, and measured."""
    VERIFY = enum.auto()
    """A decision is in force, and compared with what the step takes."""
    HOLD = enum.auto()
    """The decision holds, and is watched."""


_FOLLOWING: Final = {
    State.FLOOR: (State.MEASURE,),
    State.MEASURE: (State.VERIFY, State.MEASURE),
    State.VERIFY: (State.VERIFY, State.HOLD, State.MEASURE),
    State.HOLD: (State.HOLD, State.MEASURE),
}

Agree = Callable[[tuple[int, ...]], tuple[int, ...]]


class BudgetController:
    """Decides for one engine, between its iterations. While a decision holds it costs a few microseconds a step.

    Args:
        budget_bytes: what the process may hold on its device.
        device: of the engine.
        executor: of the engine, with the policy `Planned`.
        gauge: measures what the process holds.
        is_early_certain: see `make_memory_model`.

    Attributes:
        state: see `State`.
        chosen: the decision, and what else could have been; None before the first.
        measured_bytes: what the process held in the last step that was verified or watched.
        agree: returns the largest of each number over the ranks that must decide alike; every rank calls it at the same
            time, with as many numbers. The default is one rank.
        start_together: called before the link is measured; see `measure_link`.
        options: what the model can recompute.
    """

    def __init__(
        self, budget_bytes: int, device: Device, executor: Executor, gauge: MemoryGauge, is_early_certain: bool
    ) -> None:
        assert isinstance(executor.policy, PlannedPolicy)
        self.budget_bytes: int = budget_bytes
        self.state: State = State.FLOOR
        self.chosen: Chosen | None = None
        self.measured_bytes: int = 0
        self.measured_ms: float = 0.0
        self.agree: Agree = tuple
        self.start_together: Callable[[], None] = lambda: None
        self.options: tuple[RecomputeOption, ...] = ()
        self._device = device
        self._executor = executor
        self._policy = executor.policy
        self._gauge = gauge
        self._is_early_certain = is_early_certain
        self._optimizers: OptimizerWatch | None = OptimizerWatch()
        self._recorder: MeasuringRecorder | None = None
        self._job: Job | None = None
        self._model: MemoryModel | None = None
        self._costs = Costs()
        self._num_steps = 0
        self._num_corrections = 0
        self._num_in_window = 0
        self._decisions: dict[tuple[Action, ...], Chosen] = {}
        self._end_mark: TimeMark = None
        self._begin_mark: TimeMark = None
        self._current_actions: tuple[Action, ...] = ()
        self._has_grown = False
        self._step_bytes = 0  # the most that was allocated in the last step

    # -- the engine calls --------------------------------------------------------------------------------------------

    def begin(self, actions: Sequence[Action], is_combined: bool) -> MeasuringRecorder | None:
        """Decide about the iteration that begins; returns its recorder if it is to be measured.

        Raises:
            BudgetError: if the budget is below what a step takes with everything offloaded.
        """
        if self._num_steps:
            self._conclude(is_combined)
        if self.state is not State.HOLD:
            self._gauge.reset()
        if self._job is not None and self.state in (State.VERIFY, State.HOLD):
            self._follow(tuple(actions))
        self._num_steps += 1
        self._recorder = MeasuringRecorder(self._device, self._gauge) if self.state is State.MEASURE else None
        self._begin_mark = self._mark()
        return self._recorder

    def end(self, stats: IterationStats) -> None:
        """Note what the iteration took that is over."""
        if isinstance(self._gauge, ResidentGauge):
            self._gauge.restore()
        self._step_bytes = self._gauge.peak_bytes()
        self._end_mark = self._mark()
        self._has_grown = stats.num_outgrown_groups + stats.num_unplanned_groups > 0

    def abandon(self) -> None:
        """Forget the running iteration, which has raised. Idempotent."""
        if self._recorder is not None:
            self._recorder.discard()
            self._recorder = None

    def close(self) -> None:
        """Watch no more. Idempotent."""
        self.abandon()
        if self._optimizers is not None:
            self._optimizers.close()

    def _mark(self) -> TimeMark:
        return self._device.mark_time(self._device.current_stream()) if self.state is State.VERIFY else None

    # -- from state to state -----------------------------------------------------------------------------------------

    def _go(self, to: State) -> None:
        if to not in _FOLLOWING[self.state]:
            raise AssertionError(f"the budget cannot go from {self.state.name} to {to.name}")
        self.state = to

    def _conclude(self, is_combined: bool) -> None:
        """Draw conclusions from the step before."""
        if self.state is State.FLOOR:
            self._await_optimizer()
        elif self.state is State.MEASURE:
            self._conclude_measuring(is_combined)
        elif self._has_outgrown():
            self._measure_again()
        elif self.state is State.VERIFY:
            self._verify()
        else:
            self._watch()

    def _await_optimizer(self) -> None:
        watch = self._optimizers
        assert watch is not None
        if watch.has_stepped or self._num_steps >= _MAX_WAIT_STEPS:
            watch.close()
            self._optimizers = None
            self._go(State.MEASURE)

    def _conclude_measuring(self, is_combined: bool) -> None:
        recorder, self._recorder = self._recorder, None
        shapes = None if recorder is None else self._policy.shapes(recorder.actions())
        if recorder is None or shapes is None:
            return self._go(State.MEASURE)  # it was abandoned, or its chunks are not alike: the next one may do
        between = self._gauge.peak_bytes()
        record = recorder.finish().get()
        measured = recorder.boundaries
        overhead = max(0, self._gauge.held_bytes() - max([between, *(each.peak_bytes for each in measured)]))
        timed = with_times(shapes, recorder.intervals(), record.waits)
        job = Job(tuple(recorder.actions()), timed, self._policy.own_bounds, is_combined)
        model = make_memory_model(
            job, MeasuredMemory(measured, between, overhead), is_early_certain=self._is_early_certain
        )
        self._job, self._model = self._agreed(job, model)
        self._costs = Costs(self._measure_link(timed), options=self.options, floor_ms=record.duration_ms)
        self._num_corrections = 0
        self._decide(is_first=self.chosen is None)
        self._go(State.VERIFY)

    def _measure_link(self, shapes: Shapes) -> Link:
        streams = self._executor.store.context.copy_out_stream, self._executor.store.context.copy_in_stream
        nbytes = min(_LINK_BYTES, max(1, largest_bytes(shapes)))
        link = measure_link(self._device, streams, nbytes, self.start_together)
        slowest = self.agree((-round(1e3 * link.out_gbps), -round(1e3 * link.in_gbps)))
        return Link(*(max(1, -each) / 1e3 for each in slowest))

    def _verify(self) -> None:
        """Compare what the step took with what was predicted; correct the model, or be content with it."""
        assert self.chosen is not None and self._model is not None
        self.measured_bytes = self._gauge.held_bytes()
        self.measured_ms = self._device.milliseconds_between(self._begin_mark, self._end_mark)
        [error] = self.agree((self.measured_bytes - self.chosen.best.held_bytes,))
        is_over = self.chosen.best.held_bytes + error > self.budget_bytes
        is_wasteful = -error > _CLOSE * self.budget_bytes and self.chosen.best.stalled_ms > 0
        if self._num_corrections < _MAX_CORRECTIONS and (is_over or is_wasteful or error > _CLOSE * self.budget_bytes):
            self._num_corrections += 1
            self._correct(error, is_over)
            return self._go(State.VERIFY)
        self._num_in_window = 0
        self._go(State.HOLD)
        if is_over:
            self._correct(error, is_over)
        logger.info("%s", self._summary())

    def _correct(self, error: int, is_over: bool) -> None:
        assert self._model is not None
        self._model = self._model.corrected(error)
        self._decide()
        if is_over:
            self._gauge.trim()

    def _watch(self) -> None:
        """Keep less at once where a step went over the budget, more where it was well below for long."""
        assert self._model is not None and self.chosen is not None
        self._num_in_window += 1
        self.measured_bytes = self._gauge.held_bytes()
        over = self.measured_bytes - self.budget_bytes
        if over > 0:
            if self._step_bytes + self._model.overhead_bytes + self._model.correction_bytes > self.budget_bytes:
                logger.warning("a step took %.2f GiB more than its budget: less is kept", over / (1 << 30))
                self._correct(max(0, self.measured_bytes - self.chosen.best.held_bytes), is_over=True)
            self._gauge.trim()  # else only evaluation, or an optimizer, has left the allocator with more
            self._begin_window()
        elif self._num_in_window >= _WINDOW_STEPS:
            self._use_what_is_left()
            self._begin_window()
        elif self._gauge.peak_bytes() > self._step_bytes:
            self._gauge.reset()  # the peak was between the steps

    def _use_what_is_left(self) -> None:
        assert self._model is not None and self.chosen is not None
        least = self._step_bytes + self._model.overhead_bytes
        [unused] = self.agree((least - self.budget_bytes,))
        if -unused > _UNUSED * self.budget_bytes and self.chosen.best.stalled_ms > 0:
            self._correct((least - self.chosen.best.held_bytes) // 2, is_over=False)

    def _begin_window(self) -> None:
        self._num_in_window = 0
        self._gauge.reset()

    def _has_outgrown(self) -> bool:
        """Whether groups have become larger than what was measured, so that all else may have grown, too."""
        if self._job is None or not self._has_grown:
            return False
        now = self._policy.shapes(self._job.actions)
        return now is None or any(
            new.nbytes > _TOLERANCE * old.nbytes
            for a, b in zip(now, self._job.shapes, strict=True)
            for new, old in zip(a.groups, b.groups, strict=False)
        )

    def _measure_again(self) -> None:
        logger.info("activations have grown: one more step is measured with everything offloaded")
        self._decisions.clear()
        self._gauge.trim()
        self._executor.allow(Allowance())
        self._go(State.MEASURE)

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _decide(self, is_first: bool = False) -> None:
        """Decide anew for the measured actions, and put that in force."""
        assert self._job is not None
        self._decisions.clear()
        self._put_in_force(self._decision_for(self._job.actions, is_first))

    def _follow(self, actions: tuple[Action, ...]) -> None:
        """Put in force what was decided for a step of these actions."""
        assert self._job is not None
        if actions and actions != self._current_actions and self._policy.shapes(actions) is not None:
            self._put_in_force(self._decision_for(actions, is_first=False), actions)

    def _decision_for(self, actions: tuple[Action, ...], is_first: bool) -> Chosen:
        assert self._job is not None and self._model is not None
        found = self._decisions.get(actions)
        if found is None:
            job = dataclasses.replace(self._job, actions=actions)
            try:
                found = choose(job, self._model, self.budget_bytes, self._costs)
            except BudgetError as error:
                if is_first:
                    raise
                logger.warning("%s", error)
                found = choose(job, self._model, 0, self._costs, must_fit=False)
            self._decisions[actions] = found
        return found

    def _put_in_force(self, chosen: Chosen, actions: tuple[Action, ...] | None = None) -> None:
        assert self._job is not None
        self.chosen = chosen
        self._current_actions = actions or self._job.actions
        self._executor.allow(_allowance(self._job, chosen))

    def _agreed(self, job: Job, model: MemoryModel) -> tuple[Job, MemoryModel]:
        """Return what the ranks have measured, the worst of each figure."""
        return job, model

    def _summary(self) -> str:
        assert self.chosen is not None
        best: Prediction = self.chosen.best
        gib = 1 << 30
        return (
            f"gpu_budget {self.budget_bytes / gib:.2f} GiB: predicted {best.held_bytes / gib:.2f} GiB and "
            f"{best.step_ms:.1f} ms, measured {self.measured_bytes / gib:.2f} GiB and {self.measured_ms:.1f} ms; "
            f"{best.num_moves} groups move in a step"
        )


def _allowance(job: Job, chosen: Chosen) -> Allowance:
    decision = chosen.best.decision
    kept: dict[Slot, int] = {}
    for stage, shape in enumerate(job.shapes):
        for slot, group in zip(slots_of(stage, shape.groups), shape.groups, strict=True):
            if slot in decision.choices.kept:
                kept[slot] = round(_TOLERANCE * group.nbytes)
    resident = round(_TOLERANCE * chosen.best.resident_bytes)
    room = decision.resident_bytes
    return Allowance(decision.choices, kept, resident, room, None if room is None else chosen.curve[-1].resident_bytes)
