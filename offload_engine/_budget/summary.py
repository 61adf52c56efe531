# SPDX-License-Identifier: Apache-2.0
"""`BudgetSummary`: summarizes the decision of a budget, as numbers and as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from rich.table import Table

from offload_engine._budget.allowing import allowance_of
from offload_engine._observe.report import as_text
from offload_engine.planning.choose import Chosen
from offload_engine.planning.saved_plan import PlanFigures, SavedPlan
from offload_engine.planning.shapes import Shapes
from offload_engine.schedule import Action

_MIB: Final = 1 << 20


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
    """Of the predicted peak, allocated by tensors; the rest is reserved besides, or outside torch."""
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


def budget_text(summary: BudgetSummary, chosen: Chosen | None) -> str:
    """Return the tables of a decision: the groups by name, unless a plan was given, and the predictions."""
    tables = [] if chosen is None else [_module_table(chosen)]
    return as_text(*tables, _total_table(summary))


def _module_table(chosen: Chosen) -> Table:
    best = chosen.best
    table = Table(title="Budget: a step by group, MiB", title_justify="left")
    table.add_column("group", overflow="fold")
    for name in ("kept", "offloaded", "recomputed", "exposed, ms"):
        table.add_column(name, justify="right")
    for name in sorted({*best.kept_bytes, *best.moved_bytes, *best.recomputed_bytes}):
        sizes = (each.get(name, 0) for each in (best.kept_bytes, best.moved_bytes, best.recomputed_bytes))
        table.add_row(name, *map(_mib, sizes), f"{best.exposed_ms.get(name, 0.0):,.1f}")
    return table


def _total_table(summary: BudgetSummary) -> Table:
    table = Table(title="Budget: the whole step, MiB", title_justify="left")
    table.add_column("")
    for name in ("held", "allocated", "reserved besides", "outside torch", "step, ms"):
        table.add_column(name, justify="right")
    table.add_row("budget", _mib(summary.budget_bytes))
    parts = _parts(summary.predicted_peak_bytes, summary.predicted_allocated_bytes, summary.outside_bytes)
    table.add_row("predicted", *parts, f"{summary.predicted_step_ms:,.1f}")
    parts = _parts(summary.measured_peak_bytes, summary.measured_allocated_bytes, summary.outside_bytes)
    measured_ms = f"{summary.measured_step_ms:,.1f}" if summary.measured_step_ms else "-"
    table.add_row("measured", *(parts if summary.measured_peak_bytes else "----"), measured_ms)
    table.add_row("lowest budget", _mib(summary.lowest_bytes), "", "", "", f"{summary.lowest_step_ms:,.1f}")
    return table


def _parts(held_bytes: int, allocated_bytes: int, outside_bytes: int) -> list[str]:
    reserved_bytes = max(0, held_bytes - allocated_bytes - outside_bytes)
    return [_mib(nbytes) for nbytes in (held_bytes, allocated_bytes, reserved_bytes, outside_bytes)]


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.1f}"
