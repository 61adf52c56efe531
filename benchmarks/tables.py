# SPDX-License-Identifier: Apache-2.0
"""Tables and pictures of records. matplotlib is imported where a picture is drawn, and needs no display."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

Record = dict[str, Any]
Column = str | tuple[str, str] | Callable[[Record], str]
"""A field in words, a field and the format of its numbers, or what makes the words."""
MIB, GIB = 1 << 20, 1 << 30


def shown(value: Any, form: str = "") -> str:
    """Show a value as `format` does, or bytes in "MiB", few with a decimal; empty where there is none."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if form == "MiB":
        form, value = ",.1f" if 0 < abs(value) < 100 * MIB else ",.0f", value / MIB
    return format(value, form)


def table(title: str, columns: Mapping[str, Column], records: Iterable[Record], as_markdown: bool = False) -> Table:
    """Make a table with a row for each record."""
    made = Table(title=title, title_justify="left", box=box.MARKDOWN if as_markdown else box.HEAVY_HEAD)
    for head, column in columns.items():
        made.add_column(head, justify="right" if isinstance(column, tuple) else "left", overflow="fold")
    for record in records:
        made.add_row(*(escape(_cell(column, record)) for column in columns.values()))
    return made


def _cell(column: Column, record: Record) -> str:
    if isinstance(column, str):
        return shown(record.get(column))
    return shown(record.get(column[0]), column[1]) if isinstance(column, tuple) else column(record)


def show(*tables: Table) -> None:
    """Print tables, those without rows left out; in Markdown no line is wrapped."""
    with_rows = [one for one in tables if one.row_count]
    width = 1000 if any(one.box is box.MARKDOWN for one in with_rows) else 150
    Console(width=max(width, Console().width)).print(*with_rows)


@contextmanager
def picture(file: Path, *panels: int, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, as `pyplot.subplots` makes them; at the end they are written to `file`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(*panels, layout="constrained", **options)
    yield figure, axes
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def plot_points(
    file: Path, points: Iterable[tuple[str, float, float, dict[str, Any]]], title: str, **axes: Any
) -> None:
    """Plot what contenders reach, each as a label, what it holds in bytes, a figure, and the style of its point."""
    from matplotlib import colormaps

    with picture(file, figsize=(11, 6)) as (figure, panel):
        for index, (label, nbytes, value, style) in enumerate(points):
            panel.scatter(nbytes / GIB, value, s=100, color=colormaps["tab20"](index % 20), label=label, **style)
        panel.set(**axes)
        panel.set_title(title, loc="left", fontsize=9)
        panel.grid(alpha=0.3)
        figure.legend(loc="outside right upper", fontsize=8, frameon=False, labelspacing=0.8)
