# SPDX-License-Identifier: Apache-2.0
"""`SecondStep`: records the second training step of a model, and logs its tables for all ranks."""

from __future__ import annotations

import logging

from offload_engine import OffloadEngine
from offload_engine.rank_reports import RankReports

logger = logging.getLogger(__name__)


class SecondStep:
    """Records the second training step of a model and logs, once and on rank 0, the tables of all ranks.

    The first step allocates host memory, builds communicators and compiles kernels, so its waits and bandwidths are not
    typical. The records are gathered from the end of the third step on, when the device has enough queued work while
    the host makes its record, and no rank waits for another one.

    Args:
        reports: takes the records of the ranks to rank 0; None: nothing is logged.
        trace: file for this rank's recording; None: none.
        may_record: False: rank 0 logs its own counters instead, unless a trace is requested.
    """

    def __init__(self, reports: RankReports | None, trace: str | None = None, may_record: bool = True) -> None:
        self._reports = reports
        self._trace = trace
        self._is_recorded = trace is not None or (may_record and reports is not None)
        self._num_steps = 0
        self._summary = ""  # of rank 0's counters
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Return whether nothing is left to do."""
        return self._is_over

    def after_step(self, engine: OffloadEngine | None) -> None:
        """Record or log what is due, after each step that has not raised.

        Args:
            engine: engine of the model; None: this rank offloads nothing, but as rank 0 it logs what others do.
        """
        self._num_steps += 1
        if self._num_steps == 1 and engine is not None and self._is_recorded:
            engine.record(self._trace)
            if self._reports is not None:
                self._reports.announce()
        elif self._num_steps == 2 and engine is not None and not self._is_recorded:
            self._summary = engine.report()
        elif self._num_steps > 2 and not self._is_over:
            self._gather(engine, self._num_steps == 3)

    def close(self, engine: OffloadEngine | None) -> None:
        """Log the records gathered so far, if two steps are over, before the engine closes."""
        if self._num_steps >= 2 and not self._is_over:
            self._gather(engine, self._num_steps == 2, is_last_look=True)

    def _gather(self, engine: OffloadEngine | None, is_first_look: bool, is_last_look: bool = False) -> None:
        if self._reports is None or (
            is_first_look and not self._reports.share(None if engine is None else engine.last_record)
        ):
            self._is_over = True
            return
        text = self._reports.table(is_last_look)
        if text is None:
            return
        self._is_over = True
        if text := text or self._summary:
            own = "" if engine is None else f" (rank 0 {engine})"
            logger.info("activation offload in the second step%s:\n%s", own, text.rstrip())
