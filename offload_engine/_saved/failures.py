"""`CopyFailures`: failures of copies, until they are raised."""

from __future__ import annotations

from offload_engine._devices.base import CopyError
from offload_engine._saved.storage import SavedStorage


class CopyFailures:
    """Keeps the failure of a copy whose storage autograd dropped before the copy was awaited.

    Attributes:
        has_failed: a copy has failed since the last reset.
    """

    def __init__(self) -> None:
        self.has_failed: bool = False
        self._deferred: CopyError | None = None

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

    def raise_deferred(self) -> None:
        """Raise the failure that was deferred, if any.

        Raises:
            CopyError: names the group.
        """
        if self._deferred is None:
            return
        failure, self._deferred = self._deferred, None
        try:
            raise failure
        finally:
            del failure  # breaks the cycle of this frame and the error, which would keep the step's graph alive

    def clear(self) -> None:
        """Forget all failures, after a reset."""
        self.has_failed = False
        self._deferred = None
