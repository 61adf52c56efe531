# SPDX-License-Identifier: Apache-2.0
"""`Observer`: decides which steps of an engine are recorded, where the records go, and how they are reported."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from offload_engine._devices.base import Device
from offload_engine._observe.goals import Goals
from offload_engine._observe.modules import ModuleHooks
from offload_engine._observe.pending import PendingRecord, TraceWriter
from offload_engine._observe.reasons import Reason
from offload_engine._observe.record import StepRecord
from offload_engine._observe.recorder import Recorder
from offload_engine._observe.report import counts_of, report_table, summary_of_stats
from offload_engine._observe.waits import PendingTimes, WaitTimer, times_of
from offload_engine.config import OffloadConfig
from offload_engine.counted import counted
from offload_engine.sizes import short_size
from offload_engine.stats import IterationStats, StepTimes

logger = logging.getLogger(__name__)


class Observer:
    """Makes the recorders of one engine, for the steps that `ask` or `ask_for_times` requested.

    Args:
        config: the engine's, whose goals each step is compared with; None: no goals.
        pipeline: rank and number of ranks of the pipeline whose stages the chunks are.
        logs_first_step: log a summary of the counters of the first step with groups, on rank 0.
    """

    def __init__(
        self,
        pipeline: tuple[int, int] = (0, 1),
        logs_first_step: bool = True,
        config: OffloadConfig | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._is_dry_run = config is not None and config.dry_run
        self._goals = None if config is None else Goals(config, is_whole=logs_first_step)
        self._times: PendingTimes | None = None  # of the last step that was timed
        self._is_timed = False  # whether the next step is to be timed
        self._pending: PendingRecord | None = None
        self._writer: TraceWriter | None = None  # of the last file
        self._asked: str | None = None  # the requested file
        self._is_asked = False
        self._modules: ModuleHooks | None = None  # for the next step that is recorded
        self._file: Path | None = None  # of the step that is recorded now
        self._num_steps = 0
        self._has_logged = not logs_first_step

    @property
    def record(self) -> StepRecord | None:
        """Return the record of the last recorded step; blocks until the device has reached the end of that step."""
        if self._pending is None:
            return None
        if self._writer is not None:
            self._writer.hurry()
        return self._pending.get()

    def ask(self, file: str | os.PathLike[str] | None = None) -> None:
        """Record the next step that begins. Hooks on all modules are on from now on, to know which one saves what.

        The start of the step would be too late: if it starts with the first saved tensor, the model already runs.

        Args:
            file: path for `write_trace`; `{rank}` and `{step}` in the name are replaced. With several ranks, a name
                without the rank gets it. None: only `record`.
        """
        self._is_asked, self._asked = True, None if file is None else os.fspath(file)
        if self._modules is None:
            self._modules = ModuleHooks()

    @property
    def times(self) -> StepTimes | None:
        """Return the times of the last step that was timed or recorded; blocks until the device has finished it."""
        if self._times is not None:
            return self._times.get()
        record = self.record
        return None if record is None else times_of(record)

    def ask_for_times(self) -> None:
        """Time the next step that begins, and its waits, unless it is recorded: a record has these times, too."""
        self._is_timed = True

    def begin(self, device: Device, is_dry_run: bool = False) -> Recorder | None:
        """Start a step; returns its recorder if it is to be recorded."""
        step, self._num_steps = self._num_steps, self._num_steps + 1
        is_timed, self._is_timed = self._is_timed, False
        if not self._is_asked:
            return WaitTimer(device) if is_timed else None
        self._is_asked = False
        modules, self._modules = self._modules, None
        rank = _rank()
        self._file = None if self._asked is None else _path(self._asked, {"{rank}": rank, "{step}": step})
        return Recorder(
            device,
            rank=rank,
            step=step,
            pipeline=self._pipeline,
            fallback=Reason.DRY_RUN if is_dry_run else Reason.FITS,
            modules=modules,
            compares_clocks=self._file is not None,
        )

    def end(self, recorder: Recorder | None, stats: IterationStats) -> None:
        """End a step: start writing its file, if it has one, and log the first report on rank 0."""
        if isinstance(recorder, WaitTimer):
            self._times = recorder.end()
        elif recorder is not None:
            self._times = None
            self._pending = recorder.finish(counts_of(stats))
            if self._file is not None:
                self._finish_file()  # one file at a time, so that writers do not pile up
                self._writer = TraceWriter(self._pending, self._file)
                self._writer.begin()
        if not self._has_logged and stats.num_groups and _rank() == 0:
            self._has_logged = True
            text = self.line(stats) if self._is_dry_run else summary_of_stats(stats).rstrip()
            logger.info("activation offload in the first step: %s", text)
        if self._goals is not None:
            self._goals.check(stats)

    def line(self, stats: IterationStats) -> str:
        """Return one line about the last step; for a dry run, about what it would have moved."""
        if not self._is_dry_run or not stats.num_groups:
            return stats.line(self.times)
        movable = short_size(stats.managed_bytes - stats.kept_bytes)
        return (
            f"dry run: {counted(stats.num_groups, 'group')} saved {short_size(stats.managed_bytes)} in a step, of "
            f"which {movable} would leave the device and come back; nothing was moved"
        )

    def report(self, stats: IterationStats) -> str:
        """Return the tables of the last recorded step; without one, a summary of the last step's counters."""
        record = self.record
        return summary_of_stats(stats) if record is None else report_table([record])

    def close(self) -> None:
        """Wait until the file of the last recorded step is written; record no other step. Idempotent."""
        self._is_asked = False
        if self._modules is not None:
            self._modules.remove()
            self._modules = None
        self._finish_file()

    def _finish_file(self) -> None:
        if self._writer is not None:
            self._writer.finish()
            self._writer = None


class StepTimer:
    """Times single steps of one engine, and how long compute waits for copies in them.

    A timed step takes about a microsecond more per group; other steps take no more time.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def ask(self) -> None:
        """Time the next step that begins."""
        self._observer.ask_for_times()

    @property
    def times(self) -> StepTimes | None:
        """Return the times of the last step that was timed or recorded; None before any.

        Blocks until the device has finished that step.
        """
        return self._observer.times


def _path(path: str, names: Mapping[str, int]) -> Path:
    if "{rank}" not in path and _num_ranks() > 1:  # otherwise all ranks would write one file
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
