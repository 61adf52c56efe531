# SPDX-License-Identifier: Apache-2.0
"""What programs that print figures share: labels of files on the command line, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

MIB = 1 << 20


def mib(nbytes: float | None, digits: int = 0) -> str:
    """Show bytes in MiB; empty where there are none to show."""
    return "" if nbytes is None else f"{nbytes / MIB:,.{digits}f}"


def number(value: float | None, digits: int) -> str:
    """Show a number with so many digits behind the point; empty where there is none."""
    return "" if value is None else f"{value:,.{digits}f}"


class Rows(NamedTuple):
    """A table, for the terminal or for a document."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_words: int = 1
    """So many columns at the left are words, the others figures."""

    def for_terminal(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for index, name in enumerate(self.head):
            table.add_column(name, justify="left" if index < self.num_words else "right")
        for row in self.rows:
            table.add_row(*row)
        return table

    def as_markdown(self) -> str:
        lines = [self.head, ("---",) * len(self.head), *self.rows]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

    def print(self, as_markdown: bool) -> None:
        if as_markdown:
            print(self.as_markdown())
        else:
            Console(width=max(140, Console().width)).print(self.for_terminal())


def labelled_file(text: str) -> tuple[str, Path]:
    """Parse `LABEL=FILE` of a command line; the label of a file alone is its name up to the first dot."""
    label, separator, file = text.partition("=")
    return (label, Path(file)) if separator else (Path(text).name.partition(".")[0], Path(text))


def mistake_in(files: Sequence[tuple[str, Path]]) -> str | None:
    """Return the mistake in files of a command line, if any: a label given twice, a file that does not exist."""
    if len({label for label, _ in files}) < len(files):
        return "two files have the same label: write LABEL=FILE"
    absent = [str(file) for _, file in files if not file.is_file()]
    return f"there is no file {', '.join(absent)}" if absent else None
