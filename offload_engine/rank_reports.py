# SPDX-License-Identifier: Apache-2.0
"""`RankReports` and `BudgetReports`: make one table of what all ranks have to say, without a collective."""

from __future__ import annotations

import time
from typing import Final

from offload_engine._budget.tables import StageBudget, budgets_text
from offload_engine._budget.view import BudgetView
from offload_engine._observe.fold import sums_of
from offload_engine._observe.gathering import Gathering
from offload_engine._observe.record import StepRecord
from offload_engine._observe.report import table_of_ranks
from offload_engine.counted import counted

_MOST_LOOKS: Final = 32
"""After as many steps of rank 0 its table is made without the ranks that have not shared."""


class RankReports:
    """Gathers the records that the ranks of the process group have of one step on rank 0; see `Gathering`.

    Args:
        name: distinguishes reports that are gathered at the same time; the same on all ranks.
        timeout_s: how long rank 0 looks for announced records, from its first look on.
    """

    def __init__(self, name: str, timeout_s: float = 20.0) -> None:
        self._gathering = Gathering(name)
        self._timeout_s = timeout_s
        self._deadline: float | None = None

    def announce(self) -> None:
        """Declare that this rank will call `share`."""
        self._gathering.announce()

    def share(self, record: StepRecord | None) -> bool:
        """Send the record that `announce` declared.

        Args:
            record: of this rank, if it has one.

        Returns:
            Whether this is rank 0, which will have the tables.
        """
        return self._gathering.share(None if record is None else sums_of(record))

    def table(self, is_last_look: bool = False) -> str | None:
        """Return the tables of all ranks on rank 0, once all have arrived or time is up.

        Args:
            is_last_look: do not wait for ranks that have not arrived.

        Returns:
            None: look again. Empty: none has a record.
        """
        found = self._gathering
        found.look()
        if self._deadline is None:
            self._deadline = time.monotonic() + self._timeout_s
        if found.num_missing and not is_last_look and time.monotonic() < self._deadline:
            return None
        ranks = sorted(found.found, key=lambda sums: sums.rank)
        text = table_of_ranks(ranks) if ranks else ""
        if num_missing := found.num_without + found.num_missing:
            text += f"without {counted(num_missing, 'other rank')}, whose record of this step did not come in time\n"
        return text


class BudgetReports:
    """Gathers what the budgets of all ranks have decided and measured on rank 0; see `Gathering`.

    Args:
        name: distinguishes budgets that are gathered at the same time; the same on all ranks.
        stage: rank of this process in its pipeline.
    """

    def __init__(self, name: str, stage: int) -> None:
        self._gathering = Gathering(f"budget/{name}")
        self._stage = stage
        self._num_looks = 0

    def announce(self) -> None:
        """Declare that this rank will call `share`."""
        self._gathering.announce()

    def share(self, budget: BudgetView) -> bool:
        """Send what the budget of this rank has decided and measured.

        Returns:
            Whether this is rank 0, which will have the tables.
        """
        return self._gathering.share(budget.of_stage(self._stage))

    def table(self, is_last_look: bool = False) -> str | None:
        """Return the tables of all stages on rank 0, once all ranks have shared, or after 32 looks.

        Args:
            is_last_look: do not wait for ranks that have not shared.

        Returns:
            None: look again. Empty: none has decided anything.
        """
        found, self._num_looks = self._gathering, self._num_looks + 1
        found.look()
        if found.num_missing and not is_last_look and self._num_looks < _MOST_LOOKS:
            return None
        budgets: list[StageBudget] = found.found
        text = budgets_text(budgets) if budgets else ""
        if num_missing := found.num_without + found.num_missing:
            missing = counted(num_missing, "other rank")
            text += f"without {missing}: nothing decided there in time, or everything stays offloaded\n"
        return text
