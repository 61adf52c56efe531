# SPDX-License-Identifier: Apache-2.0
"""`BudgetLog`: logs what the budgets of all stages have decided and measured."""

from __future__ import annotations

import logging

from offload_engine import OffloadEngine
from offload_engine.rank_reports import BudgetReports

logger = logging.getLogger(__name__)


class BudgetLog:
    """Logs, once and on rank 0, the tables of the budgets of all ranks, when their first decisions hold.

    Each rank shares its figures when it has them: stages of a pipeline decide on their own. No rank waits for another.

    Args:
        reports: takes the figures of the ranks to rank 0; None: nothing is logged.
    """

    def __init__(self, reports: BudgetReports | None) -> None:
        self._reports = reports
        self._has_shared = False

    def begin(self, engine: OffloadEngine) -> None:
        """Declare, before the first step, that this rank will share its figures."""
        if engine.budget is None:
            self._reports = None
        elif self._reports is not None:
            self._reports.announce()

    def after_step(self, engine: OffloadEngine) -> None:
        """Share or log what is due, after each step that has not raised."""
        if engine.budget is not None and (self._has_shared or engine.budget.has_result):
            self._share_or_log(engine, is_last_look=False)

    def close(self, engine: OffloadEngine) -> None:
        """Share and log what is there, before the engine closes."""
        if engine.budget is not None and engine.budget.has_begun:
            self._share_or_log(engine, is_last_look=True)

    def _share_or_log(self, engine: OffloadEngine, is_last_look: bool) -> None:
        if self._reports is None:
            return
        if not self._has_shared:
            assert engine.budget is not None
            self._has_shared = True
            if not self._reports.share(engine.budget):
                self._reports = None
                return
        text = self._reports.table(is_last_look)
        if text is not None:
            self._reports = None
            if text:
                logger.info("activation offload within its budget:\n%s", text.rstrip())
