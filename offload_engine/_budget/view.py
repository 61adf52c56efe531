# SPDX-License-Identifier: Apache-2.0
"""`BudgetView`: shows the decision of a budget and its measurements."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from offload_engine._budget.decide import Decider, step_ms_of
from offload_engine._budget.hold_times import HoldTimes
from offload_engine._budget.last_step import LastStep
from offload_engine._budget.shortage import MemoryParts, shortage_text
from offload_engine._budget.state import State
from offload_engine._budget.summary import BudgetSummary, Measured, figures_of, summary_of
from offload_engine._budget.tables import StageBudget, budgets_text, groups_of
from offload_engine._devices.base import MemoryGauge
from offload_engine.sizes import fine_size

logger = logging.getLogger(__name__)


class BudgetView:
    """Shows what was decided and measured. Decides nothing.

    Args:
        decider: has the decision.
        last: what the last step took.

    Attributes:
        state: see `State`.
        decider: has the decision, and the hooks of the caller.
        measured: bytes of the last step that was verified or watched, and the time of the last that was verified.
        planning_ms: host time between steps spent on decisions and on the measurement of the link. Waiting for the
            device to reach the end of a step does not count: the device idles only from there on.
        num_planning_steps: number of steps so far that were measured or verified, before a decision holds.
    """

    def __init__(self, decider: Decider, last: LastStep) -> None:
        self.state: State = State.FLOOR
        self.decider: Decider = decider
        self._last = last
        self._times = HoldTimes()
        self.measured: Measured = Measured()
        self.planning_ms: float = 0.0
        self.num_planning_steps: int = 0

    @contextmanager
    def planning(self, is_planning: bool) -> Iterator[None]:
        """Count the host time inside, unless a decision holds."""
        began_s = time.perf_counter()
        yield
        if is_planning:
            self.planning_ms += 1e3 * (time.perf_counter() - began_s)

    @property
    def is_settled(self) -> bool:
        """Return whether a decision holds whose times are known."""
        return self.state is State.HOLD and not self._times.num_awaited

    @property
    def has_result(self) -> bool:
        """Return whether the first decision holds and its steps have been timed, or none could be made."""
        summary = self.summary
        return self.is_settled and (summary is None or summary.measured_step_ms > 0)

    @property
    def summary(self) -> BudgetSummary | None:
        """Return the figures of the decision, or of the plan that was given; None before there is one."""
        chosen, decider = self.decider.chosen, self.decider
        if chosen is not None:
            predicted = chosen.best.held_bytes, figures_of(chosen)
        elif (saved := decider.saved) is not None:
            predicted = saved.held_bytes, saved.figures
        else:
            return None
        return summary_of(*predicted, decider.budget_bytes, self.measured, self._gauge.outside_bytes())

    @property
    def curve(self) -> list[tuple[int, float]]:
        """Return, for every budget, lowest first, the bytes that the process would hold and the ms of a step.

        Empty before the first decision.
        """
        chosen, known = self.decider.chosen, self.decider.known
        if chosen is None or known is None:
            return []
        return [(each.held_bytes, step_ms_of(self.decider, each)) for each in known.curve(chosen, self.decider.actions)]

    def report(self) -> str:
        """Return the table of the decision of this rank; empty before there is one."""
        own = self.of_stage(0)
        return "" if own is None else budgets_text([own])

    def of_stage(self, stage: int) -> StageBudget | None:
        """Return what was decided and measured on this rank, a stage of a pipeline; None before there is a decision."""
        summary, chosen = self.summary, self.decider.chosen
        if summary is None:
            return None
        return StageBudget(stage, summary, () if chosen is None else groups_of(chosen.best))

    def log(self) -> None:
        """Log the decision with its measurements."""
        chosen = self.decider.chosen
        assert chosen is not None
        logger.info(
            "gpu_budget %s: predicted %s and %.1f ms, measured %s and %.1f ms",
            fine_size(self.decider.budget_bytes),
            fine_size(chosen.best.held_bytes),
            chosen.step_ms,
            fine_size(self.measured.held_bytes),
            self.measured.milliseconds,
        )

    def shortage(self, resident_bytes: int) -> str:
        """Explain why the running iteration has run out of memory.

        Args:
            resident_bytes: the most bytes of groups on the device in this iteration.
        """
        peak = self._gauge.peak_bytes()
        found = MemoryParts(resident_bytes, max(0, peak - resident_bytes), max(0, self._gauge.held_bytes() - peak))
        return shortage_text(self.decider.budget_bytes, self._expected(), found)

    @property
    def _gauge(self) -> MemoryGauge:
        return self._last.gauge

    def _expected(self) -> MemoryParts | None:
        """Return what the decision in force takes; None before the first that was measured."""
        if self.decider.chosen is None:
            return None
        best = self.decider.chosen.best
        other = best.allocated_bytes - best.resident_bytes
        return MemoryParts(best.resident_bytes, other, best.overhead_bytes)
