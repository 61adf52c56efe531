# SPDX-License-Identifier: Apache-2.0
"""Shows a progress bar for work that takes more than two seconds."""

from __future__ import annotations

import time
from typing import Any, Final, TextIO

from rich.console import Console
from rich.progress import Progress as Bar

_SILENT_S: Final = 2.0


class Progress:
    """Counts steps; after two seconds a bar shows them, if the stream is a terminal.

    Args:
        total: number of steps.
        stream: stream of the bar.
    """

    def __init__(self, total: int, stream: TextIO) -> None:
        self._total = total
        self._done = 0
        self._begin = time.monotonic()
        self._bar = Bar(console=Console(file=stream), transient=True) if stream.isatty() else None
        self._task: Any = None

    def advance(self) -> None:
        """Count a step that is done."""
        self._done += 1
        if self._bar is None:
            return
        if self._task is None and time.monotonic() - self._begin > _SILENT_S:
            self._bar.start()
            self._task = self._bar.add_task("rehearsing", total=self._total)
        if self._task is not None:
            self._bar.update(self._task, completed=self._done)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
