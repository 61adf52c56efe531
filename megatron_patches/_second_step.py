"""`SecondStep`: what is recorded of the second training step of a model, and logged for all ranks."""

from __future__ import annotations

import logging

from offload_engine import OffloadEngine
from offload_engine.rank_reports import RankReports

logger = logging.getLogger(__name__)


class SecondStep:
    """Records the second training step of a model and logs, once and on rank 0, the tables of all ranks.

    The second, because the first allocates host memory, builds communicators and compiles kernels: its waits and its
    bandwidths are not those of the steps to come.

    Args:
        reports: takes what the ranks have recorded to rank 0; None: nothing is logged.
        trace: file for this rank's recording; None: none.
        may_record: False: rank 0 logs its own counters instead, unless a trace is asked for.
    """

    def __init__(self, reports: RankReports | None, trace: str | None = None, may_record: bool = True) -> None:
        self._reports = reports
        self._trace = trace
        self._is_recorded = trace is not None or (may_record and reports is not None)
        self._num_steps = 0

    @property
    def is_over(self) -> bool:
        """Return whether two steps are over: nothing is left to do."""
        return self._num_steps >= 2

    def after_step(self, engine: OffloadEngine | None) -> None:
        """Called after each step that has not raised.

        Args:
            engine: of the model; None: this rank offloads nothing, but as rank 0 it logs what others do.
        """
        self._num_steps += 1
        if self._num_steps == 1 and engine is not None and self._is_recorded:
            engine.record(self._trace)
            if self._reports is not None:
                self._reports.announce()
        elif self._num_steps == 2 and self._reports is not None:
            self._log(engine, self._reports)

    def _log(self, engine: OffloadEngine | None, reports: RankReports) -> None:
        text = reports.share(None if engine is None else engine.last_record)
        if text == "" and engine is not None:
            text = engine.report()
        if text:
            logger.info("activation offload in the second step:\n%s", text.rstrip())
