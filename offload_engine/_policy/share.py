# SPDX-License-Identifier: Apache-2.0
"""`LeavingShare`: limits how much of what each chunk saves may leave, in the order of its forward."""

from __future__ import annotations

from collections.abc import Sequence

from offload_engine._saved.storage import TensorGroup
from offload_engine.config import OffloadConfig
from offload_engine.schedule import Action, ChunkKey, count_alive


class LeavingShare:
    """Decides for each group that commits whether it is beyond the share that may leave.

    The bytes that a chunk saves are known from the step before, so in the first step all may leave. The last groups of
    each chunk stay, because the others can be away for longer. Like `Keeping`, this object outlives executors.

    Args:
        fraction: share of a chunk's bytes that may leave, from 0 to 1.
        kept_bytes: at least this many bytes stay, over all chunks that wait for their backward.
    """

    def __init__(self, fraction: float, kept_bytes: int) -> None:
        self._fraction = fraction
        self._kept_bytes = kept_bytes
        self._saved: dict[int, int] = {}  # by virtual stage: the most bytes that a chunk of the step before saved
        self._so_far: dict[ChunkKey, int] = {}  # bytes that chunks of the running step have saved
        self._num_waiting: int = 1

    def begin(self, actions: Sequence[Action]) -> None:
        """Start a step: learn from the one before."""
        if self._so_far:
            self._saved = {}
            for key, nbytes in self._so_far.items():
                self._saved[key.stage] = max(nbytes, self._saved.get(key.stage, 0))
            self._so_far = {}
        self._num_waiting = max(count_alive(actions), default=1)

    def clear(self) -> None:
        """Forget the running step, for instance after an exception."""
        self._so_far = {}

    def stays(self, group: TensorGroup) -> bool:
        """Count a group that commits; return whether it stays. Call it once for each group, in order."""
        key = group.chunk
        nbytes = self._so_far.get(key, 0) + group.own_bytes
        self._so_far[key] = nbytes
        saved = self._saved.get(key.stage)
        if saved is None or group.own_bytes == 0:
            return False
        return nbytes > leaving_bytes(saved, self._fraction, self._kept_bytes, self._num_waiting)


def leaving_bytes(saved_bytes: int, fraction: float, kept_bytes: int, num_waiting: int) -> float:
    """Return how many of a chunk's saved bytes may leave, if `num_waiting` chunks wait for their backward at once."""
    return min(fraction * saved_bytes, float(saved_bytes - kept_bytes // num_waiting))


def share_of(config: OffloadConfig) -> LeavingShare | None:
    """Return the share that a configuration asks for; None if all may leave."""
    return LeavingShare(config.fraction, config.kept_bytes) if config.keeps_a_share else None
