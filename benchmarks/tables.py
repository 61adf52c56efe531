"""What the tools that read files of measurements share: labels on the command line, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


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


def print_table(
    title: str, head: Sequence[str], lines: Sequence[Sequence[str]], *, num_words: int, as_markdown: bool
) -> None:
    """Print a table; its first `num_words` columns are words, the others figures."""
    if as_markdown:
        print("\n".join(f"| {' | '.join(line)} |" for line in [head, ("---",) * len(head), *lines]))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index < num_words else "right")
    for line in lines:
        table.add_row(*line)
    Console(width=max(140, Console().width)).print(table)
