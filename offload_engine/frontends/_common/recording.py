# SPDX-License-Identifier: Apache-2.0
"""`RecordsSteps`: records and reports steps, for the handle of every front-end."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

from offload_engine.engine import OffloadEngine


class RecordsSteps(ABC):
    """Records steps of a handle's engine, and reports them."""

    @property
    @abstractmethod
    def engine(self) -> OffloadEngine:
        """Return the engine that moves the tensors."""

    def __str__(self) -> str:
        """Return one line about the last step: `print(handle)`."""
        return f"{type(self).__name__}: {self.engine}"

    def record(self, file: str | os.PathLike[str] | None = None) -> None:
        """Record the next step that begins; see docs/observe.md.

        Args:
            file: path to write; `{rank}` and `{step}` in the name are replaced. None: record for `report` only.
        """
        self.engine.record(file)

    def report(self) -> str:
        """Return the tables of the last recorded step of this rank, or a summary of its counters."""
        return self.engine.report()
