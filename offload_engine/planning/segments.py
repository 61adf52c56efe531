# SPDX-License-Identifier: Apache-2.0
"""Imitates torch's allocator of GPU memory: which segments it reserves, and how it divides them.

Sizes decide everything, so what a step reserves in vain follows from the order of its allocations. A request takes the
smallest free block that is large enough, of equal ones the first in memory; without one a segment is reserved, and
stays until `trim`. Expandable segments are not imitated.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

_MIB: Final = 1 << 20
_ROUNDED_TO: Final = 512
_MOST_SMALL: Final = _MIB
"""Requests up to this have segments of their own."""
_SMALL_SEGMENT: Final = 2 * _MIB
_LARGE_SEGMENT: Final = 20 * _MIB
_LEAST_ALONE: Final = 10 * _MIB
"""Larger requests get a segment of their size."""
_SEGMENTS_TO: Final = 2 * _MIB
_LEAST_LEFT_SMALL: Final = _ROUNDED_TO
_LEAST_LEFT_LARGE: Final = _MIB + _ROUNDED_TO
"""A block is divided if so many bytes are left, in small and in large segments."""

SPARE_SHARE: Final = 1 / 64
"""Share of what is used of an arena without an end by which one with an end is larger: there blocks have less room."""
SPARE_SHARE_INEXACT: Final = 1 / 32
"""The same, if the budget has room for it, where some blocks are freed in another order than is replayed. Those in use
on other streams, as in pipelines, have a lead each, another one in each step: of MoE stages, replayed with random leads
for each block, 15 of 1,120 steps lacked room with a 64th to spare, 3 with a 32nd, all of one arena. A forward that runs
again and stops early is another than the recorded one: in three of eight runs of a Qwen2 with checkpointed layers on an
H200 a block of an MLP had no room with a 64th to spare; all of these would have had room with a 32nd."""


def rounded(nbytes: int) -> int:
    """Return how many bytes the allocator counts for a request."""
    return -(-nbytes // _ROUNDED_TO) * _ROUNDED_TO


def segment_bytes(nbytes: int) -> int:
    """Return how large a segment for one large request is."""
    return -(-nbytes // _SEGMENTS_TO) * _SEGMENTS_TO


def with_spare(nbytes: int, share: float = SPARE_SHARE) -> int:
    """Return how large an arena is that has some to spare, beside the bytes that are used of it."""
    return segment_bytes(round((1 + share) * nbytes))


def is_small_block(nbytes: int) -> bool:
    """Return whether a request gets a block of the segments for small ones."""
    return nbytes <= _MOST_SMALL


class Reserved(NamedTuple):
    """What an allocator comes to."""

    reserved_bytes: int
    peak_bytes: int
    """Allocated at once, in the last step."""
    arena_bytes: int = 0
    """How much of the arena was used: no block was beyond."""


class Segment(NamedTuple):
    """Memory that an allocator has reserved at once."""

    at: int
    stream: int
    is_small: bool
    blocks: tuple[tuple[int, bool], ...]
    """Bytes of each, in order, and whether it is free."""


class Block:
    """A part of a segment, or a whole one; `before` and `behind` are its neighbours in it."""

    __slots__ = ("at", "before", "behind", "is_free", "nbytes", "pool")

    def __init__(self, at: int, nbytes: int, pool: Pool) -> None:
        self.at = at
        self.nbytes = nbytes
        self.pool = pool
        self.is_free = False
        self.before: Block | None = None
        self.behind: Block | None = None

    @property
    def is_whole(self) -> bool:
        """Return whether it is a whole segment."""
        return self.before is None and self.behind is None

    def divide(self, nbytes: int) -> None:
        """Keep so many bytes; the rest becomes a free block."""
        rest = Block(self.at + nbytes, self.nbytes - nbytes, self.pool)
        rest.before, rest.behind = self, self.behind
        if rest.behind is not None:
            rest.behind.before = rest
        self.behind, self.nbytes = rest, nbytes
        self.pool.give(rest)

    def join(self) -> None:
        """Become one with the block behind."""
        other = self.behind
        assert other is not None
        self.nbytes += other.nbytes
        self.behind = other.behind
        if self.behind is not None:
            self.behind.before = self


class Pool:
    """The segments of a stream, for small or for large blocks.

    Attributes:
        stream: whose requests it serves.
        is_small: these are small.
        free: blocks in the order of their bytes, equal ones as in memory.
    """

    __slots__ = ("free", "is_small", "stream")

    def __init__(self, stream: int, is_small: bool) -> None:
        self.stream = stream
        self.is_small = is_small
        self.free: list[Block] = []

    def give(self, block: Block) -> None:
        """Make a block free."""
        block.is_free = True
        self.free.insert(self._place(block.nbytes, block.at), block)

    def take(self, nbytes: int) -> Block | None:
        """Take the smallest free block that is large enough."""
        place = self._place(nbytes, 0)
        if place == len(self.free):
            return None
        block = self.free.pop(place)
        block.is_free = False
        return block

    def take_back(self, block: Block) -> None:
        """Take a certain block that is free."""
        del self.free[self._place(block.nbytes, block.at)]
        block.is_free = False

    def _place(self, nbytes: int, at: int) -> int:
        """Return how many free blocks come before one. (As machine code this loop is faster than `bisect`.)"""
        low, high = 0, len(self.free)
        while low < high:
            middle = (low + high) >> 1
            block = self.free[middle]
            if block.nbytes < nbytes or (block.nbytes == nbytes and block.at < at):
                low = middle + 1
            else:
                high = middle
        return low


class SegmentAllocator:
    """Allocates and frees blocks that have no memory.

    A driver gives each new segment the highest address at which it fits, as recorded on H200s: in what was returned to
    it, or below all others. (Holes that other allocations have left are not known.) Without a driver, as in a
    rehearsal, addresses rise.

    Attributes:
        reserved_bytes: bytes of all segments.
        allocated_bytes: bytes of all blocks that are not free.
        arena_bytes: see `Reserved`.
    """

    def __init__(self) -> None:
        self.reserved_bytes: int = 0
        self.allocated_bytes: int = 0
        self.arena_bytes: int = 0
        self._pools: dict[tuple[int, bool], Pool] = {}  # by stream, small or not
        self._lowest: int | None = None  # end of the addresses of which a driver has used none
        self._holes: list[tuple[int, int]] = []  # what `trim` has returned to a driver: (begin, end), the highest first
        self._end = 0  # of the last segment without one
        self._arena: tuple[int, int] = (0, 0)  # where it begins, and ends

    def adopt(self, segments: Iterable[Segment]) -> dict[int, Block]:
        """Take over segments as they are; return the blocks in use, by address."""
        used: dict[int, Block] = {}
        found = sorted(segments)
        self._lowest = _behind_largest_gap(found) if found else None
        for at, stream, is_small, blocks in found:
            pool, before = self._pool(stream, is_small), None
            for nbytes, is_free in blocks:
                block = Block(at, nbytes, pool)
                block.before = before
                if before is not None:
                    before.behind = block
                self.reserved_bytes += nbytes
                if is_free:
                    pool.give(block)
                else:
                    used[at] = block
                    self.allocated_bytes += nbytes
                before, at = block, at + nbytes
            self._end = max(self._end, at)
        return used

    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """Return a block of at least so many bytes, from the pool of a stream."""
        nbytes = max(_ROUNDED_TO, rounded(nbytes))
        pool = self._pool(stream, is_small_block(nbytes))
        block = pool.take(nbytes) or self._reserve(nbytes, pool)
        if block.nbytes - nbytes >= (_LEAST_LEFT_SMALL if pool.is_small else _LEAST_LEFT_LARGE):
            block.divide(nbytes)
        self.allocated_bytes += block.nbytes
        begin, end = self._arena
        if begin <= block.at < end:
            self.arena_bytes = max(self.arena_bytes, block.at + block.nbytes - begin)
        return block

    def reserve_arena(self, nbytes: int, stream: int = 0) -> None:
        """Reserve one segment for large blocks, of which none is in use."""
        block = self._reserve(nbytes, self._pool(stream, False))
        self._arena = block.at, block.at + block.nbytes
        block.pool.give(block)

    def free(self, block: Block) -> None:
        """Free a block; it becomes one with free neighbours."""
        self.allocated_bytes -= block.nbytes
        pool, before, behind = block.pool, block.before, block.behind
        if behind is not None and behind.is_free:
            pool.take_back(behind)
            block.join()
        if before is not None and before.is_free:
            pool.take_back(before)
            before.join()
            block = before
        pool.give(block)

    def free_parts(self) -> set[tuple[int, int]]:
        """Return address and bytes of the blocks that are free."""
        return {(block.at, block.nbytes) for pool in self._pools.values() for block in pool.free}

    def trim(self) -> None:
        """Return the segments that are free."""
        returned: list[tuple[int, int]] = []
        for pool in self._pools.values():
            returned += [(block.at, block.at + block.nbytes) for block in pool.free if block.is_whole]
            pool.free = [block for block in pool.free if not block.is_whole]
        self.reserved_bytes -= sum(end - begin for begin, end in returned)
        if self._lowest is not None:
            self._holes = _merged([*self._holes, *returned])
            if self._holes and self._holes[-1][0] == self._lowest:
                self._lowest = self._holes.pop()[1]

    def _pool(self, stream: int, is_small: bool) -> Pool:
        found = self._pools.get((stream, is_small))
        if found is None:
            found = self._pools[stream, is_small] = Pool(stream, is_small)
        return found

    def _reserve(self, nbytes: int, pool: Pool) -> Block:
        if pool.is_small:
            size = _SMALL_SEGMENT
        else:
            size = _LARGE_SEGMENT if nbytes < _LEAST_ALONE else segment_bytes(nbytes)
        self.reserved_bytes += size
        return Block(self._place(size), size, pool)

    def _place(self, size: int) -> int:
        if self._lowest is None:
            self._end += size
            return self._end - size
        for number, (begin, end) in enumerate(self._holes):
            if end - begin >= size:
                self._holes[number] = begin, end - size
                return end - size
        self._lowest -= size
        return self._lowest


def _behind_largest_gap(segments: Iterable[Segment]) -> int:
    """Return where the largest gap between segments ends: a few of them lie far below all others."""
    end, gaps = 0, []
    for at, _, _, blocks in segments:
        gaps.append((at - end, at))
        end = at + sum(nbytes for nbytes, _ in blocks)
    return max(gaps)[1]


def _merged(holes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges of addresses with those that touch in one, the highest first."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(holes, reverse=True):
        if found and found[-1][0] == end:
            found[-1] = begin, found[-1][1]
        else:
            found.append((begin, end))
    return found
