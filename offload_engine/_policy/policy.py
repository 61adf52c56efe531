# SPDX-License-Identifier: Apache-2.0
"""`Policy`: decides the moves at each boundary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from offload_engine._chunk.progress import ChunkProgress
from offload_engine._policy.leaving import LeavingQueue
from offload_engine._saved.counters import ByteCounters
from offload_engine._saved.storage import TensorGroup
from offload_engine.planning.choices import Allowance, Choices
from offload_engine.planning.moves import BoundaryKind, Op
from offload_engine.schedule import Action

Move = tuple[Op, TensorGroup]
"""One move of one group, to be performed now. A plain tuple, which the compiled core makes without a call."""


class Policy:
    """Answers each boundary with moves. The executor performs each move before it requests the next one.

    So a policy that yields its moves sees the effect of earlier moves in the counters and the queue. It changes only
    its own state and the positions of the chunks.

    This base class is the interface of the policies, and keeps everything on the device.

    Args:
        counters: bytes saved and resident; read only.
        leaving: copy-outs that are not released; read only.

    Attributes:
        releases_completed: whether a completed copy-out is released at the next boundary; if False, only `must_release`
            decides.
        choices: what is chosen for each group. Only plans read it: the executor itself keeps groups chosen to be kept.
    """

    releases_completed: bool = True
    choices: Choices

    def __init__(self, counters: ByteCounters, leaving: LeavingQueue) -> None:
        self.counters: ByteCounters = counters
        self.leaving: LeavingQueue = leaving
        self.choices = Choices()

    def allow(self, allowance: Allowance) -> None:
        """Set what may be on the device from the next step on.

        Raises:
            ValueError: if the allowance bounds resident bytes: only plans have a bound that can change.
        """
        if allowance.room_bytes is not None:
            raise ValueError(f"room_bytes={allowance.room_bytes:,} needs OffloadConfig(policy=Planned())")
        self.choices = allowance.choices

    def begin(self, actions: Sequence[Action], is_combined: bool) -> None:
        """Start an iteration.

        Args:
            actions: the schedule of this rank, in order; empty: not known.
            is_combined: whether each forward runs together with the next backward.
        """

    def at(self, kind: BoundaryKind, chunk: ChunkProgress | None, group: TensorGroup | None) -> Iterable[Move]:
        """Answer a boundary.

        Args:
            kind: kind of the boundary.
            chunk: its chunk; None at ITERATION_END, and at HELD outside every forward.
            group: the group that commits, is no longer kept, or whose backward begins; None at other boundaries, and if
                the chunk has no such group.
        """
        return ()

    def must_release(self) -> bool:
        """Return whether compute must wait for the oldest copy-out now (back-pressure). The queue is not empty."""
        return False

    def clear(self) -> None:
        """Forget the iteration, except the sizes learned so far."""
