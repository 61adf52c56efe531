# SPDX-License-Identifier: Apache-2.0
"""`CopyFailures`: keeps failed copies and interrupts until they can be raised."""

from __future__ import annotations

from offload_engine._devices.base import CopyError
from offload_engine._saved.storage import SavedStorage


class CopyFailures:
    """Keeps errors that could not be raised where they occurred: Python ignores exceptions in destructors.

    Attributes:
        has_failed: a copy has failed, or an interrupt has come; saved tensors may be incomplete until the next reset.
        is_torn: an interrupt has ended an operation before it was done. The books of storages and copies may be wrong,
            so nothing is retired any more; the reset makes new books.
    """

    def __init__(self) -> None:
        self.has_failed: bool = False
        self.is_torn: bool = False
        self._deferred: BaseException | None = None

    def failed(self, error: CopyError, copy: str, saved: SavedStorage) -> CopyError:
        """Return the error to raise for a failed copy; names the group and the remedy."""
        self.has_failed = True
        return CopyError(
            f"the {copy} of {saved.group} failed: {error}. Model parameters are untouched; "
            "remove the cause, call reset_iteration() and run the step again."
        )

    def defer(self, error: CopyError, saved: SavedStorage) -> None:
        """Defer a failure that cannot be raised, as in a destructor, to `raise_deferred`; the first one is kept."""
        self._deferred = self._deferred or self.failed(error, "copy", saved)

    def note(self, error: BaseException | None) -> None:
        """Note that `error` ended an operation, which is torn if `error` is an interrupt."""
        if error is not None and not isinstance(error, Exception):
            self.tear()

    def tear(self) -> None:
        """Note that the books may be wrong."""
        self.is_torn = self.has_failed = True

    def defer_interrupt(self, interrupt: BaseException) -> None:
        """Defer an interrupt that came in a destructor to `raise_deferred`."""
        self.note(interrupt)
        self._deferred = interrupt.with_traceback(None)  # its frames would keep the step's graph alive

    def raise_deferred(self) -> None:
        """Raise a deferred failure or interrupt, if there is one.

        Raises:
            CopyError: if a copy failed; names the group.
            KeyboardInterrupt: if it came in a destructor.
        """
        if self._deferred is None:
            return
        failure, self._deferred = self._deferred, None
        try:
            raise failure
        finally:
            del failure  # breaks the cycle of this frame and the error, which would keep the step's graph alive
