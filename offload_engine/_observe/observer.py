"""`Observer`: which steps of an engine are recorded, where the records go, and what is reported of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from offload_engine._devices.base import Device
from offload_engine._observe.chrome_trace import write_trace
from offload_engine._observe.reasons import Reason
from offload_engine._observe.record import StepRecord
from offload_engine._observe.recorder import Recorder
from offload_engine._observe.report import counts_of, report_table, summary_of_stats
from offload_engine.stats import IterationStats

logger = logging.getLogger(__name__)


class Observer:
    """Makes the recorders of one engine. Between `begin` and `end` of a step that nothing asked for it does nothing.

    Args:
        pipeline: rank and number of ranks of the pipeline whose stages the chunks are.
        logs_first_step: log what the counters of the first step with groups tell, on rank 0.

    Attributes:
        record: of the last step that was recorded.
    """

    def __init__(self, pipeline: tuple[int, int] = (0, 1), logs_first_step: bool = True) -> None:
        self.record: StepRecord | None = None
        self._pipeline = pipeline
        self._file: str | None = None
        self._is_asked = False
        self._num_steps = 0
        self._has_logged = not logs_first_step

    def ask(self, file: str | os.PathLike[str] | None = None) -> None:
        """Record the next step that begins.

        Args:
            file: for `write_trace`; `{rank}` and `{step}` in its name are replaced, and among several ranks the rank is
                added where it is missing. None: only `record`.
        """
        self._is_asked, self._file = True, None if file is None else os.fspath(file)

    def begin(self, device: Device, is_dry_run: bool = False) -> Recorder | None:
        """Start a step; returns its recorder if it is to be recorded."""
        step, self._num_steps = self._num_steps, self._num_steps + 1
        if not self._is_asked:
            return None
        self._is_asked = False
        return Recorder(device, rank=_rank(), step=step, fallback=Reason.DRY_RUN if is_dry_run else Reason.FITS)

    def end(self, recorder: Recorder | None, stats: IterationStats) -> None:
        """End a step: complete its record, write its file, and log the first report on rank 0."""
        if recorder is not None:
            rank, size = self._pipeline
            self.record = replace(recorder.finish(counts_of(stats)), pipeline_rank=rank, num_pipeline_ranks=size)
            if self._file is not None:
                names: Mapping[str, int] = {"{rank}": self.record.rank, "{step}": self.record.step}
                logger.info("recorded step %d in %s", self.record.step, write_trace(self.record, self._path(names)))
        if not self._has_logged and stats.num_groups and _rank() == 0:
            self._has_logged = True
            logger.info("activation offload in the first step:\n%s", self.report(stats))

    def report(self, stats: IterationStats) -> str:
        """Return the tables of the last recorded step, else what the counters of the last step tell."""
        return summary_of_stats(stats) if self.record is None else report_table([self.record])

    def _path(self, names: Mapping[str, int]) -> Path:
        path = self._file or ""
        if "{rank}" not in path and _num_ranks() > 1:  # else all ranks would write one file
            folder, name = os.path.split(path)
            stem, dot, suffix = name.partition(".")
            path = os.path.join(folder, f"{stem}_rank{{rank}}{dot}{suffix}")
        for placeholder, number in names.items():
            path = path.replace(placeholder, str(number))
        return Path(path)


def _num_ranks() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
