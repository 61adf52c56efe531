# SPDX-License-Identifier: Apache-2.0
"""Imitates torch's allocator of GPU memory: which segments it reserves, and how it divides them.

Sizes decide everything, so what a step reserves in vain follows from the order of its allocations. A request takes the
smallest free block that is large enough; without one a segment is reserved, and stays until `trim`.
"""

from __future__ import annotations

import bisect
from typing import Final

_MIB: Final = 1 << 20
_ROUNDED_TO: Final = 512
_MOST_SMALL: Final = _MIB
"""Requests up to this have segments of their own."""
_SMALL_SEGMENT: Final = 2 * _MIB
_LARGE_SEGMENT: Final = 20 * _MIB
_LEAST_ALONE: Final = 10 * _MIB
"""Larger requests get a segment of their size."""
_SEGMENTS_TO: Final = 2 * _MIB
_LEAST_LEFT: Final = {True: _ROUNDED_TO, False: _MIB + _ROUNDED_TO}
"""A block is divided if so many bytes are left, in small and in large segments."""


def rounded(nbytes: int) -> int:
    """Return how many bytes the allocator counts for a request."""
    return -(-nbytes // _ROUNDED_TO) * _ROUNDED_TO


class Block:
    """A part of a segment, or a whole one; `before` and `behind` are its neighbours in it."""

    __slots__ = ("at", "before", "behind", "is_free", "is_small", "nbytes")

    def __init__(self, at: int, nbytes: int, is_small: bool) -> None:
        self.at = at
        self.nbytes = nbytes
        self.is_small = is_small
        self.is_free = False
        self.before: Block | None = None
        self.behind: Block | None = None


class SegmentAllocator:
    """Allocates and frees blocks that have no memory.

    Attributes:
        reserved_bytes: bytes of all segments.
    """

    def __init__(self) -> None:
        self.reserved_bytes: int = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}  # small or not: in order of size
        self._end = 0  # of the last segment

    def allocate(self, nbytes: int) -> Block:
        """Return a block of at least so many bytes."""
        nbytes = max(_ROUNDED_TO, rounded(nbytes))
        is_small = nbytes <= _MOST_SMALL
        free = self._free[is_small]
        place = bisect.bisect_left(free, (nbytes, -1))
        block = free.pop(place)[2] if place < len(free) else self._reserve(nbytes, is_small)
        block.is_free = False
        if block.nbytes - nbytes >= _LEAST_LEFT[is_small]:
            self._divide(block, nbytes)
        return block

    def free(self, block: Block) -> None:
        """Free a block; it becomes one with free neighbours."""
        for other in (block.before, block.behind):
            if other is not None and other.is_free:
                self._take_back(other)
                first, second = (other, block) if other is block.before else (block, other)
                first.nbytes += second.nbytes
                first.behind = second.behind
                if second.behind is not None:
                    second.behind.before = first
                block = first
        self._give(block)

    def trim(self) -> None:
        """Return the segments that are free."""
        for is_small, free in self._free.items():
            whole = [each for each in free if each[2].before is None and each[2].behind is None]
            self.reserved_bytes -= sum(nbytes for nbytes, _, _ in whole)
            self._free[is_small] = [each for each in free if each[2].before is not None or each[2].behind is not None]

    def _reserve(self, nbytes: int, is_small: bool) -> Block:
        if is_small:
            size = _SMALL_SEGMENT
        else:
            size = _LARGE_SEGMENT if nbytes < _LEAST_ALONE else -(-nbytes // _SEGMENTS_TO) * _SEGMENTS_TO
        block = Block(self._end, size, is_small)
        self._end += size
        self.reserved_bytes += size
        return block

    def _divide(self, block: Block, nbytes: int) -> None:
        rest = Block(block.at + nbytes, block.nbytes - nbytes, block.is_small)
        rest.before, rest.behind = block, block.behind
        if block.behind is not None:
            block.behind.before = rest
        block.behind, block.nbytes = rest, nbytes
        self._give(rest)

    def _give(self, block: Block) -> None:
        block.is_free = True
        bisect.insort(self._free[block.is_small], (block.nbytes, block.at, block))

    def _take_back(self, block: Block) -> None:
        free = self._free[block.is_small]
        del free[bisect.bisect_left(free, (block.nbytes, block.at))]
