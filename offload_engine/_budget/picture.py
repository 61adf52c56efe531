# SPDX-License-Identifier: Apache-2.0
"""Draws throughput over memory: a curve through what budgets take, and marks beside it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple


class Point(NamedTuple):
    """What a step takes."""

    nbytes: int
    """The most that the process holds on its device."""
    rate: float
    """Throughput."""


class Mark(NamedTuple):
    """A point with a name of its own."""

    name: str
    point: Point
    shape: str
    """A marker of matplotlib."""


def draw_budgets(
    file: str | os.PathLike[str],
    curve: Sequence[Point],
    marks: Sequence[Mark],
    budget_bytes: int,
    x_label: str,
    y_label: str,
) -> None:
    """Draw a curve through the points of budgets, with the budget that was set as a line.

    Args:
        file: path to write; its suffix, such as ".png" or ".svg", selects the format.
        curve: by memory; more memory than that of the last one takes no less time.
        marks: points beside the curve.
        budget_bytes: the budget.
        x_label: what memory it is; the unit follows.
        y_label: throughput of what, with its unit.

    Raises:
        ModuleNotFoundError: without matplotlib.
        OSError, ValueError: if the file cannot be written, or its suffix is not known.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # there may be no display
    axes: Any = figure.add_subplot()
    points = [*curve, *(mark.point for mark in marks)]
    size, unit = _unit_of(max([budget_bytes, *(point.nbytes for point in points)]))
    beyond = [curve[-1]._replace(nbytes=budget_bytes)] if curve and budget_bytes > curve[-1].nbytes else []
    _draw(
        axes,
        [*curve, *beyond],
        size,
        "o-",
        label="predicted for each budget",
        markersize=4,
        markevery=slice(len(curve)),
    )
    for mark in marks:
        _draw(axes, [mark.point], size, mark.shape, label=mark.name, markersize=9, fillstyle="none")
    axes.axvline(budget_bytes / size, linestyle=":", color="gray", label="budget")
    axes.set_xlabel(f"{x_label}, {unit}")
    axes.set_ylabel(y_label)
    axes.set_ylim(0, 1.1 * max((point.rate for point in points), default=1.0))
    axes.legend(fontsize="small")
    figure.savefig(os.fspath(file), dpi=120)


def _unit_of(most_bytes: int) -> tuple[int, str]:
    return (1 << 30, "GiB") if most_bytes >= 1 << 30 else (1 << 20, "MiB")


def _draw(axes: Any, points: Sequence[Point], size: int, style: str, **settings: Any) -> None:
    if points:
        axes.plot([point.nbytes / size for point in points], [point.rate for point in points], style, **settings)
