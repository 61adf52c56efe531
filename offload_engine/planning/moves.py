# SPDX-License-Identifier: Apache-2.0
"""Defines moves and the boundaries at which they happen, for policies, plans, recordings and the simulator.

A boundary is a moment at which the engine is called. As text:

    F0.3          the forward of the chunk (stage 0, microbatch 3) begins
    F0.3:5        its group 5 commits
    F0.3:launch5  5 groups have committed, and the device, after a wait for the host, has work again
    F0.3:held5    5 groups have committed, and outside references to saved storages are declared as no longer read
    F0.3:5/unkeep its group 5 was kept, and its backward does not come at once after all
    F0.3:tail     the last block of the forward begins
    F0.3:head     the layers are through: logits and loss come next
    F0.3:end      the forward is over
    B0.3:loss     its backward has passed the loss
    B0.3          its backward begins
    B0.3:turn     its backward begins right after its forward, and nothing had announced it
    B0.3:5        the backward of its group 5 begins
    B0.3:5/end    the backward of its group 5 is over
    end           the iteration ends
"""

from __future__ import annotations

import enum
import re
from typing import Final, NamedTuple

from offload_engine.schedule import ChunkKey


class Op(enum.Enum):
    """The kinds of move."""

    __hash__ = object.__hash__  # that of Enum is slow Python code, and plans look up each boundary

    OUT = "OUT"
    """Its copy-out is issued."""
    DROP = "DROP"
    """Its device bytes are released; compute waits for the copy-out if that is not complete."""
    IN = "IN"
    """Its copy-in is issued; what has not been released is recalled instead."""


class BoundaryKind(enum.Enum):
    """The kinds of boundary, with their text: `{c}` is the chunk, `{i}` an index or a count of groups."""

    __hash__ = object.__hash__  # see `Op`

    FORWARD = "F{c}"
    COMMIT = "F{c}:{i}"
    LAUNCH = "F{c}:launch{i}"
    HELD = "F{c}:held{i}"
    UNKEEP = "F{c}:{i}/unkeep"
    TAIL = "F{c}:tail"
    HEAD = "F{c}:head"
    FORWARD_END = "F{c}:end"
    LOSS_DONE = "B{c}:loss"
    CHUNK_BACKWARD = "B{c}"
    TURN_AROUND = "B{c}:turn"
    BACKWARD = "B{c}:{i}"
    BACKWARD_END = "B{c}:{i}/end"
    ITERATION_END = "end"


class GroupKey(NamedTuple):
    """A group of one step: `0.3:5` is group 5 of the chunk (stage 0, microbatch 3)."""

    chunk: ChunkKey
    index: int  # type: ignore[assignment]  # hides `tuple.index`

    def __str__(self) -> str:
        return f"{self.chunk.stage}.{self.chunk.microbatch}:{self.index}"


class Boundary(NamedTuple):
    """One boundary of one step."""

    kind: BoundaryKind
    chunk: ChunkKey | None = None
    """None for `ITERATION_END`."""
    index: int = -1  # type: ignore[assignment]  # hides `tuple.index`
    """Group, or number of groups committed, if the kind has one; otherwise -1."""

    def __str__(self) -> str:
        chunk = "" if self.chunk is None else f"{self.chunk.stage}.{self.chunk.microbatch}"
        return self.kind.value.format(c=chunk, i=self.index)

    @property
    def group(self) -> GroupKey:
        """Return the group of this boundary. Only for kinds that have one."""
        assert self.chunk is not None
        return GroupKey(self.chunk, self.index)


class PlannedMove(NamedTuple):
    """One move of one group, as text `OUT 0.3:5`."""

    op: Op
    group: GroupKey

    def __str__(self) -> str:
        return f"{self.op.value} {self.group}"


# Constants, because in the compiled core a constant costs nothing and a member of an enum is an attribute lookup.
OUT: Final = Op.OUT
DROP: Final = Op.DROP
IN: Final = Op.IN
FORWARD: Final = BoundaryKind.FORWARD
COMMIT: Final = BoundaryKind.COMMIT
LAUNCH: Final = BoundaryKind.LAUNCH
HELD: Final = BoundaryKind.HELD
UNKEEP: Final = BoundaryKind.UNKEEP
TAIL: Final = BoundaryKind.TAIL
HEAD: Final = BoundaryKind.HEAD
FORWARD_END: Final = BoundaryKind.FORWARD_END
LOSS_DONE: Final = BoundaryKind.LOSS_DONE
CHUNK_BACKWARD: Final = BoundaryKind.CHUNK_BACKWARD
TURN_AROUND: Final = BoundaryKind.TURN_AROUND
BACKWARD: Final = BoundaryKind.BACKWARD
BACKWARD_END: Final = BoundaryKind.BACKWARD_END
ITERATION_END: Final = BoundaryKind.ITERATION_END

_NUMBER: Final = "(?:0|[1-9][0-9]*)"  # no leading zeros: one text for one boundary
_CHUNK: Final = rf"(?P<stage>{_NUMBER})\.(?P<microbatch>{_NUMBER})"
_GROUP: Final = re.compile(rf"{_CHUNK}:(?P<index>{_NUMBER})")


def parse_group(text: str) -> GroupKey:
    """Parse `0.3:5`; the exact inverse of `str(group)`.

    Raises:
        ValueError: if `text` is not a group.
    """
    match = _GROUP.fullmatch(text)
    if match is None:
        raise ValueError(f"not a group: {text!r}; expected stage, dot, microbatch, colon, index, as in '0.3:5'")
    return GroupKey(ChunkKey(int(match["stage"]), int(match["microbatch"])), int(match["index"]))


def parse_boundary(text: str) -> Boundary:
    """Parse a boundary; the exact inverse of `str(boundary)`.

    Raises:
        ValueError: if `text` is not a boundary.
    """
    for kind in BoundaryKind:
        pattern = re.escape(kind.value).replace(r"\{c\}", _CHUNK).replace(r"\{i\}", rf"(?P<index>{_NUMBER})")
        match = re.fullmatch(pattern, text)
        if match is not None:
            found = match.groupdict()
            chunk = ChunkKey(int(found["stage"]), int(found["microbatch"])) if "stage" in found else None
            return Boundary(kind, chunk, int(found["index"]) if "index" in found else -1)
    raise ValueError(f"not a boundary: {text!r}; expected one such as 'F0.3:5', 'F0.3:tail', 'B0.3:5' or 'end'")
