# SPDX-License-Identifier: Apache-2.0
"""`CapturedShare`: how much of what captured forwards save may leave; the rest stays."""

from __future__ import annotations

from collections.abc import Sequence

from offload_engine._captured.saves import CapturedStorage
from offload_engine.config import OffloadConfig


class CapturedShare:
    """Decides for each captured forward whether what it has saved stays, by `fraction`, `kept_bytes` and `dry_run`.

    A capture does not tell how many come after it. So what leaves by `fraction` is spread over the forwards, rounded up
    to whole ones as megatron-core's own offload does, and what stays by `kept_bytes` is the first of what waits for its
    backward. Of what leaves, one forward does not count: it all comes back into one slot, which takes as much memory.

    Args:
        config: of the engine.
    """

    def __init__(self, config: OffloadConfig) -> None:
        self._fraction = 0.0 if config.dry_run else config.fraction
        self._kept_bytes = config.kept_bytes
        self._kept: list[CapturedStorage] = []
        self._saved_bytes = 0
        self._left_bytes = 0
        self._slot_bytes = 0  # of the largest forward that has left

    def stays(self, storages: Sequence[CapturedStorage]) -> bool:
        """Count what one forward has saved; return whether all of it stays."""
        self._saved_bytes += sum(saved.nbytes for saved in storages)
        self._kept = [saved for saved in self._kept if saved.handles]
        is_beyond = self._left_bytes - self._slot_bytes >= self._fraction * self._saved_bytes
        if is_beyond or sum(saved.nbytes for saved in self._kept) < self._kept_bytes:
            self._kept += storages
            return True
        return False

    def note_left(self, storages: Sequence[CapturedStorage]) -> None:
        """Count what one forward has saved and has left."""
        nbytes = sum(saved.nbytes for saved in storages)
        self._left_bytes += nbytes
        self._slot_bytes = max(self._slot_bytes, nbytes)
