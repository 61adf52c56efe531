"""`Policy`: what happens at each boundary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from offload_engine._chunk.progress import ChunkProgress
from offload_engine._policy.leaving import LeavingQueue
from offload_engine._saved.counters import ByteCounters
from offload_engine._saved.storage import TensorGroup
from offload_engine.planning.moves import BoundaryKind, Op
from offload_engine.schedule import Action


class Move(NamedTuple):
    """One move of one group, to be performed now."""

    op: Op
    group: TensorGroup


class Policy:
    """Answers each boundary with moves. The executor performs each move before it asks for the next one.

    So a policy that yields its moves sees, in the counters and the queue, what its earlier moves did. It changes
    nothing but its own state and the positions of the chunks.

    This base class keeps everything on the device; its methods are what the others have in common.

    Args:
        counters: how many bytes are where; read only.
        leaving: copy-outs that are not released; read only.

    Attributes:
        releases_completed: a copy-out that has completed is released at the next boundary; else `must_release` alone
            decides.
    """

    releases_completed: bool = True

    def __init__(self, counters: ByteCounters, leaving: LeavingQueue) -> None:
        self.counters: ByteCounters = counters
        self.leaving: LeavingQueue = leaving

    def begin(self, actions: Sequence[Action], is_combined: bool) -> None:
        """Start an iteration.

        Args:
            actions: that this rank will run; empty: not known.
            is_combined: each forward runs together with the backward behind it.
        """

    def at(self, kind: BoundaryKind, chunk: ChunkProgress | None, group: TensorGroup | None) -> Iterable[Move]:
        """Answer a boundary.

        Args:
            kind: of the boundary.
            chunk: whose boundary it is; None at ITERATION_END and HELD.
            group: that commits, or whose backward begins or is over; None at other boundaries, and where the backward
                of a group begins that the chunk does not have.
        """
        return ()

    def must_release(self) -> bool:
        """Return whether compute is to wait for the oldest copy-out now: the back-pressure. There is one."""
        return False

    def clear(self) -> None:
        """Forget the iteration, but not what was learned about sizes."""
