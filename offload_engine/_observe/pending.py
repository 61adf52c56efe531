# SPDX-License-Identifier: Apache-2.0
"""`PendingRecord`: makes the `StepRecord` of a recorded step, after its end on the host."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from offload_engine._observe.chrome_trace import write_trace
from offload_engine._observe.pace import AtLeisure, Pace, at_once
from offload_engine._observe.record import StepRecord

logger = logging.getLogger(__name__)


class PendingRecord:
    """Makes the record once, in the first thread that requests it.

    Args:
        make: makes the record; blocks until the device has reached the end of the step.
    """

    def __init__(self, make: Callable[[Pace], StepRecord]) -> None:
        self._make: Callable[[Pace], StepRecord] | None = make
        self._record: StepRecord | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def get(self, pace: Pace = at_once) -> StepRecord:
        """Return the record.

        Raises:
            CopyError: if the device has failed.
            RuntimeError: in a process forked since the step.
        """
        if self._record is not None:
            return self._record
        if self._pid != os.getpid():  # the thread that may hold the lock does not exist here
            raise RuntimeError(f"the step was recorded in process {self._pid}: read its record there")
        with self._lock:
            if self._make is not None:
                self._record = self._make(pace)
                self._make = None  # frees the time marks
        assert self._record is not None
        return self._record


class TraceWriter(threading.Thread):
    """Makes a record and writes its file concurrently with training. The interpreter waits for it at exit.

    It does not refer to the engine, so an engine dropped without `close()` is freed.
    """

    def __init__(self, pending: PendingRecord, file: Path) -> None:
        super().__init__(name="offload-trace", daemon=False)  # the default would be that of the current thread
        self._pending, self._file = pending, file
        self._pace = AtLeisure()

    def begin(self) -> None:
        """Start the thread; write the file now if no thread can start."""
        try:
            self.start()
        except RuntimeError:  # out of threads, or the interpreter is exiting
            self.hurry()
            self.run()

    def run(self) -> None:
        try:
            record = self._pending.get(self._pace)
            write_trace(record, self._file, self._pace)
        except Exception as error:  # a failed write must not end the training
            logger.error("a step was recorded, but could not be written to %s: %s", self._file, error)
        else:
            logger.info("recorded step %d in %s", record.step, self._file)

    def hurry(self) -> None:
        """Stop resting: a caller is about to wait for the record."""
        self._pace.hurry()

    def finish(self) -> None:
        """Wait until the file is written, or has failed."""
        self.hurry()
        if self.ident is not None:
            self.join()
