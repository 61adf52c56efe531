# SPDX-License-Identifier: Apache-2.0
"""The tables of budgets: what was decided, by stage and group, and what steps take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from rich.table import Table

from offload_engine._budget.summary import BudgetSummary
from offload_engine._observe.report import as_text
from offload_engine.planning.predict import Prediction

_MIB: Final = 1 << 20
_GROUP: Final = ("kept", "offloaded", "recomputed", "exposed, ms")
_STEP: Final = ("held", "allocated", "cached", "outside torch", "step, ms")


class GroupBytes(NamedTuple):
    """What was decided about the groups of one name, summed over a step."""

    name: str
    kept_bytes: int
    offloaded_bytes: int
    recomputed_bytes: int
    exposed_ms: float
    """How long compute waits for their copies, as predicted."""


class StageBudget(NamedTuple):
    """What the budget of one rank has decided and measured."""

    stage: int
    """Rank in its pipeline."""
    summary: BudgetSummary
    groups: tuple[GroupBytes, ...]
    """Empty where a plan was given: it has no bytes by name."""


def groups_of(best: Prediction, names: Iterable[str] = ()) -> tuple[GroupBytes, ...]:
    """Return what a prediction says of the groups of each name, in the order of `names`, or by name."""
    kept, moved, recomputed = best.kept_bytes, best.moved_bytes, best.recomputed_bytes
    ordered = dict.fromkeys([*names, *sorted({*kept, *moved, *recomputed})])
    return tuple(
        GroupBytes(name, kept.get(name, 0), moved.get(name, 0), recomputed.get(name, 0), best.exposed_ms.get(name, 0.0))
        for name in ordered
    )


def budgets_text(budgets: Sequence[StageBudget]) -> str:
    """Return the tables of several ranks. Those of a stage decide alike; what the fullest of them holds is shown."""
    stages: dict[int, StageBudget] = {}
    for each in sorted(budgets, key=lambda budget: budget.summary.measured_peak_bytes):
        stages[each.stage] = each
    ordered = [stages[stage] for stage in sorted(stages)]
    by_group = [(each.stage, each.groups) for each in ordered if each.groups]
    tables = [group_table("Budget: a step by group, MiB", by_group, _mib)] if by_group else []
    return as_text(*tables, _step_table(ordered))


def group_table(title: str, stages: Sequence[tuple[int, tuple[GroupBytes, ...]]], text: Callable[[int], str]) -> Table:
    """Return what was decided about groups, with a column for the stage if there are several.

    Args:
        title: of the table.
        stages: rank in the pipeline and groups of each stage.
        text: formats bytes.
    """
    has_stages = len(stages) > 1
    table = _table(title, has_stages, "group", _GROUP)
    for stage, groups in stages:
        for name, *sizes, exposed_ms in groups:
            table.add_row(*([str(stage)] * has_stages), name, *map(text, sizes), f"{exposed_ms:,.1f}")
        table.add_section()
    return table


def _step_table(stages: Sequence[StageBudget]) -> Table:
    has_stages = len(stages) > 1
    table = _table("Budget: the whole step, MiB", has_stages, "", _STEP)
    for stage, summary, _ in stages:
        for row in _step_rows(summary):
            table.add_row(*([str(stage)] * has_stages), *row)
        table.add_section()
    return table


def _step_rows(summary: BudgetSummary) -> list[list[str]]:
    outside = summary.outside_bytes
    measured = _parts(summary.measured_peak_bytes, summary.measured_allocated_bytes, outside)
    measured_ms = f"{summary.measured_step_ms:,.1f}" if summary.measured_step_ms else "-"
    predicted = _parts(summary.predicted_peak_bytes, summary.predicted_allocated_bytes, outside)
    return [
        ["budget", _mib(summary.budget_bytes)],
        ["predicted", *predicted, f"{summary.predicted_step_ms:,.1f}"],
        ["measured", *(measured if summary.measured_peak_bytes else "----"), measured_ms],
        ["lowest budget", _mib(summary.lowest_bytes), "", "", "", f"{summary.lowest_step_ms:,.1f}"],
    ]


def _table(title: str, has_stages: bool, first: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in (["stage"] * has_stages) + [first]:
        table.add_column(name, overflow="fold")
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _parts(held_bytes: int, allocated_bytes: int, outside_bytes: int) -> list[str]:
    cached_bytes = max(0, held_bytes - allocated_bytes - outside_bytes)
    return [_mib(nbytes) for nbytes in (held_bytes, allocated_bytes, cached_bytes, outside_bytes)]


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.1f}"
