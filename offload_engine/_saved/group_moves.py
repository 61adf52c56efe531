# SPDX-License-Identifier: Apache-2.0
"""`GroupMoves`: moves the storages of a group together."""

from __future__ import annotations

from collections.abc import Sequence

from offload_engine._devices.base import Event
from offload_engine._saved.mover import CopyOut, StorageMover
from offload_engine._saved.storage import COPYING_IN, COPYING_OUT, ON_HOST, TensorGroup
from offload_engine._saved.transfers import TransferContext, record_produced


class GroupMoves:
    """Moves the storages of a group together, for the executor, which holds the lock of `RetireQueue`.

    Args:
        mover: moves storages.
        context: device and copy streams.
    """

    def __init__(self, mover: StorageMover, context: TransferContext) -> None:
        self._mover = mover
        self._context = context

    def record_produced(self, group: TensorGroup) -> list[Event]:
        """Record events after all work of `group` queued so far, for a copy-out that is issued later."""
        storages = list(group.storages)
        for saved in storages:
            saved.is_leaving = True
        return record_produced(storages, self._context) if storages else []

    def issue_copy_out(self, group: TensorGroup, produced: Sequence[Event] | None = None) -> CopyOut | None:
        """Issue the copy-out of the own storages of `group`; return it, or None if there is nothing to copy.

        Args:
            group: only its own storages are copied.
            produced: events that `record_produced` returned when the group committed; None: it commits now.

        Raises:
            OffloadError: if the host tier has no room and `host_policy` is "error".
        """
        return self._mover.copy_out(group, produced)

    def release(self, issued: CopyOut) -> None:
        """Release the device bytes of storages copied out together, except those recalled or retired since.

        Raises:
            CopyError: if the copy-out failed; names the group.
        """
        self._mover.release(issued.storages)

    def recall(self, group: TensorGroup) -> None:
        """Recall the storages of `group` that are being copied out: they stay on the device."""
        for saved in group.storages:
            if saved.residency is COPYING_OUT:
                self._mover.recall(saved)

    def issue_copy_in(self, group: TensorGroup) -> int:
        """Issue the copy-in of the storages of `group` that are on host; return their number."""
        on_host = [saved for saved in group.storages if saved.residency is ON_HOST]
        if on_host:
            self._mover.copy_in(on_host)
        return len(on_host)

    def await_copy_in(self, group: TensorGroup) -> None:
        """Make the current stream wait for the copy-in of `group`, if one is issued.

        Raises:
            CopyError: if the copy-in failed; names the group.
        """
        arriving = [saved for saved in group.storages if saved.residency is COPYING_IN]
        if arriving:
            self._mover.await_copy_in(arriving)  # early wait: unpack waits as well
