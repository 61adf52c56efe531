# SPDX-License-Identifier: Apache-2.0
"""`LeavingQueue`: holds the copy-outs that are issued and not released."""

from __future__ import annotations

from collections import deque

from offload_engine._saved.mover import CopyOut
from offload_engine._saved.storage import TensorGroup


class LeavingQueue:
    """Holds copy-outs whose device bytes are not released yet. The executor changes it; policies only read it.

    Attributes:
        queue: the copy-outs, oldest first.
        inflight_bytes: bytes of all of them.
        largest_bytes: bytes of the largest copy-out so far.
        num_issued: number of copy-outs so far, which is the number of the next one.
    """

    def __init__(self) -> None:
        self.inflight_bytes: int = 0
        self.largest_bytes: int = 0
        self.num_issued: int = 0
        self.queue: deque[CopyOut] = deque()

    @property
    def groups(self) -> list[TensorGroup]:
        """Return the group of each copy-out, oldest first."""
        return [issued.group for issued in self.queue]

    def groups_before(self, number: int) -> list[TensorGroup]:
        """Return the groups of the copy-outs issued before the one with this number."""
        return [issued.group for issued in self.queue if issued.number < number]

    def push(self, issued: CopyOut) -> None:
        """Add a copy-out that was just issued."""
        issued.number = self.num_issued
        self.num_issued += 1
        self.queue.append(issued)
        self.inflight_bytes += issued.nbytes
        if issued.nbytes > self.largest_bytes:
            self.largest_bytes = issued.nbytes

    def pop(self) -> CopyOut:
        """Remove and return the oldest copy-out."""
        oldest = self.queue.popleft()
        self.inflight_bytes -= oldest.nbytes
        return oldest

    def take(self, group: TensorGroup) -> CopyOut | None:
        """Remove and return the oldest copy-out of `group`; None if there is none."""
        for issued in self.queue:
            if issued.group is group:
                self.queue.remove(issued)
                self.inflight_bytes -= issued.nbytes
                return issued
        return None

    def clear(self) -> None:
        """Forget all copy-outs; call it after the store has abandoned them."""
        self.queue = deque()
        self.inflight_bytes = 0
