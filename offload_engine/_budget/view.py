"""`BudgetView`: what a budget shows of itself."""

from __future__ import annotations

import logging
from typing import Final

from offload_engine._budget.decide import Decider
from offload_engine._budget.summary import BudgetSummary, budget_text, summary_of

logger = logging.getLogger(__name__)

_GIB: Final = 1 << 30


class BudgetView:
    """Shows what was decided and measured. Nothing here decides.

    Args:
        budget_bytes: what the process may hold on its device.
        decider: has the decision.

    Attributes:
        decider: has the decision, and the hooks of the caller.
        measured_bytes: what the process held at the most in the last step that was verified or watched.
        measured_ms: of the last step that was verified.
        host_ms: that the host has spent on decisions so far, waits for the device included.
    """

    def __init__(self, budget_bytes: int, decider: Decider) -> None:
        self.decider: Decider = decider
        self.measured_bytes: int = 0
        self.measured_ms: float = 0.0
        self.host_ms: float = 0.0
        self._budget_bytes = budget_bytes

    @property
    def summary(self) -> BudgetSummary | None:
        """Return the figures of the decision; None before there is one."""
        chosen = self.decider.chosen
        return chosen and summary_of(chosen, self._budget_bytes, self.measured_bytes, self.measured_ms)

    @property
    def curve(self) -> list[tuple[int, float]]:
        """Return what the process would hold, in bytes, and a step would take, in ms, with every budget, lowest first.

        Empty before there is a decision.
        """
        chosen = self.decider.chosen
        return [] if chosen is None else [(each.held_bytes, each.step_ms) for each in chosen.curve]

    def report(self) -> str:
        """Return the table of the decision; empty before there is one."""
        chosen, summary = self.decider.chosen, self.summary
        return "" if chosen is None or summary is None else budget_text(summary, chosen)

    def log(self) -> None:
        """Log the decision beside what was measured."""
        assert self.decider.chosen is not None
        best = self.decider.chosen.best
        logger.info(
            "gpu_budget %.2f GiB: predicted %.2f GiB and %.1f ms, measured %.2f GiB and %.1f ms",
            self._budget_bytes / _GIB,
            best.held_bytes / _GIB,
            best.step_ms,
            self.measured_bytes / _GIB,
            self.measured_ms,
        )
