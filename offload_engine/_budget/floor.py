# SPDX-License-Identifier: Apache-2.0
"""`FloorSteps`: what the steps that offload everything show, besides the measured one."""

from __future__ import annotations

from offload_engine._budget.last_step import LastStep
from offload_engine._budget.margin import Margin
from offload_engine._budget.optimizers import OptimizerWatch


class FloorSteps:
    """Watches the steps before a decision.

    Args:
        margin: of a budget that is measured, too; None: it is given.

    Attributes:
        optimizers: tell when their state is there.
        has_state: it is, on every rank.
        milliseconds: that such a step takes: the least of all, as each may be held up.
    """

    def __init__(self, margin: Margin | None) -> None:
        self.optimizers: OptimizerWatch = OptimizerWatch()
        self.has_state: bool = False
        self.milliseconds: float = float("inf")
        self._margin = margin

    def note(self, last: LastStep) -> None:
        """Note what a step held that is over."""
        if self._margin is not None:
            self._margin.note(last.held_bytes(), last.peak_bytes)

    def settle(self, last: LastStep) -> None:
        """Note how long a step took, when the next one begins."""
        if self.has_state:  # in the steps before, libraries are loaded
            self.milliseconds = min(self.milliseconds, last.milliseconds)

    def begin_state(self) -> None:
        """Note that optimizers have their state."""
        self.has_state = True
        self.optimizers.close()

    def forget(self) -> None:
        """Forget what steps took: later ones save other bytes."""
        self.milliseconds = float("inf")
