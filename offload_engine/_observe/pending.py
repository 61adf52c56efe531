# SPDX-License-Identifier: Apache-2.0
"""`PendingRecord`: a recorded step that is over on the host, and whose `StepRecord` is still to be made."""

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
    """Makes the record once, in the thread that asks first.

    Args:
        make: blocks until the device has come to the end of the step.
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
        if self._pid != os.getpid():  # where the thread that may hold the lock does not exist
            raise RuntimeError(f"the step was recorded in process {self._pid}: ask for its record there")
        with self._lock:
            if self._make is not None:
                self._record = self._make(pace)
                self._make = None  # gives the time marks back
        assert self._record is not None
        return self._record


class TraceWriter(threading.Thread):
    """Makes a record and writes its file beside the training. The interpreter waits for it before it exits.

    It knows no engine, so one that is dropped without `close()` can go.
    """

    def __init__(self, pending: PendingRecord, file: Path) -> None:
        super().__init__(name="offload-trace", daemon=False)  # or it would be as the thread that makes it
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
        except Exception as error:  # no failure to write may end the training
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
