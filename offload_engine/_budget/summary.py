# SPDX-License-Identifier: Apache-2.0
"""`BudgetSummary`: summarizes the decision of a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from offload_engine._budget.allowing import allowance_of
from offload_engine.planning.choose import Chosen
from offload_engine.planning.saved_plan import PlanFigures, SavedPlan
from offload_engine.planning.shapes import Shapes
from offload_engine.schedule import Action


@dataclass(frozen=True)
class BudgetSummary:
    """Figures of a decision within a budget; bytes of groups are sums over a step."""

    budget_bytes: int
    predicted_peak_bytes: int
    """The most bytes that the process holds on its device."""
    measured_peak_bytes: int
    """In the last step that was verified or watched; 0 before."""
    predicted_step_ms: float
    measured_step_ms: float
    """Of the last step that was verified, or of the first ones with a plan that was given; 0 before."""
    kept_bytes: int
    offloaded_bytes: int
    recomputed_bytes: int
    exposed_ms: float
    """How long compute waits for copies, as predicted."""
    lowest_bytes: int
    """The lowest possible budget, with everything offloaded."""
    lowest_step_ms: float
    """How long a step takes with that."""
    predicted_allocated_bytes: int
    """Of the predicted peak, allocated by tensors; the rest is cached by the allocator, or outside torch."""
    measured_allocated_bytes: int
    """Of the measured peak; 0 before."""
    outside_bytes: int
    """Held outside torch's allocator, as measured now: the context, libraries, other processes on the device."""


class Measured(NamedTuple):
    """What a step took: bytes at its peaks, and its time."""

    held_bytes: int = 0
    allocated_bytes: int = 0
    milliseconds: float = 0.0
    """Of the last step that was verified."""


def figures_of(chosen: Chosen) -> PlanFigures:
    """Return what is predicted of a step with a decision."""
    best, floor = chosen.best, chosen.floor
    return PlanFigures(
        step_ms=chosen.step_ms,
        allocated_bytes=best.allocated_bytes,
        kept_bytes=sum(best.kept_bytes.values()),
        offloaded_bytes=sum(best.moved_bytes.values()),
        recomputed_bytes=sum(best.recomputed_bytes.values()),
        exposed_ms=best.stalled_ms,
        lowest_bytes=floor.held_bytes,
        lowest_step_ms=floor.step_ms,
    )


def saved_of(chosen: Chosen, shapes: Shapes, actions: tuple[Action, ...]) -> SavedPlan:
    """Return a decision as it is saved; see `allowance_of`."""
    return SavedPlan(allowance_of(chosen, shapes, actions), chosen.best.held_bytes, figures_of(chosen))


def summary_of(
    held_bytes: int, figures: PlanFigures, budget_bytes: int, measured: Measured, outside_bytes: int
) -> BudgetSummary:
    """Sum up a decision.

    Args:
        held_bytes: the most that the process holds with it, as predicted.
        figures: what else is predicted.
        budget_bytes: the budget.
        measured: what the last step that was verified or watched took.
        outside_bytes: held outside torch's allocator.
    """
    return BudgetSummary(
        budget_bytes=budget_bytes,
        predicted_peak_bytes=held_bytes,
        measured_peak_bytes=measured.held_bytes,
        predicted_step_ms=figures.step_ms,
        measured_step_ms=measured.milliseconds,
        kept_bytes=figures.kept_bytes,
        offloaded_bytes=figures.offloaded_bytes,
        recomputed_bytes=figures.recomputed_bytes,
        exposed_ms=figures.exposed_ms,
        lowest_bytes=figures.lowest_bytes,
        lowest_step_ms=figures.lowest_step_ms,
        predicted_allocated_bytes=figures.allocated_bytes,
        measured_allocated_bytes=measured.allocated_bytes,
        outside_bytes=outside_bytes,
    )
