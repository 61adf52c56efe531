# SPDX-License-Identifier: Apache-2.0
"""`CopyFailures`: failures of copies and interrupts, until they are raised."""

from __future__ import annotations

from offload_engine._devices.base import CopyError
from offload_engine._saved.storage import SavedStorage


class CopyFailures:
    """Keeps what could not be raised where it came up: in a destructor, whose exceptions Python drops.

    Attributes:
        has_failed: a copy has failed, or an interrupt has come; saved tensors may be incomplete until the next reset.
        is_torn: an interrupt has come in the middle of an operation. What is known of storages and copies may be wrong,
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
        """Keep the first failure that cannot be raised, as in a destructor, for `raise_deferred`."""
        self._deferred = self._deferred or self.failed(error, "copy", saved)

    def note(self, error: BaseException | None) -> None:
        """Note that `error` ended an operation: an interrupt may have come between any two lines of it."""
        if error is not None and not isinstance(error, Exception):
            self.tear()

    def tear(self) -> None:
        """Note that the books may be wrong."""
        self.is_torn = self.has_failed = True

    def defer_interrupt(self, interrupt: BaseException) -> None:
        """Keep an interrupt of a destructor for `raise_deferred`."""
        self.note(interrupt)
        self._deferred = interrupt.with_traceback(None)  # its frames would keep the step's graph alive

    def raise_deferred(self) -> None:
        """Raise what was deferred, if anything.

        Raises:
            CopyError: names the group.
            KeyboardInterrupt: if it came in a destructor.
        """
        if self._deferred is None:
            return
        failure, self._deferred = self._deferred, None
        try:
            raise failure
        finally:
            del failure  # breaks the cycle of this frame and the error, which would keep the step's graph alive
