# SPDX-License-Identifier: Apache-2.0
"""Performs the allocations of a step with an imitated allocator, until it reserves no more."""

from __future__ import annotations

from typing import Final, NamedTuple

from offload_engine.planning.allocations import Life, RecordedStep
from offload_engine.planning.segments import Block, Reserved, SegmentAllocator

_MOST_STEPS: Final = 3
MOVED, AFTER_MOVES, EVENT, AFTER_EVENT = range(4)


class Place(NamedTuple):
    """A place in the order of a step."""

    moment: int
    phase: int
    """At one moment, moves come first, then what follows them, then the event with this index."""
    number: int = 0


class Use:
    """An allocation, or the end of one.

    Attributes:
        place: where it is in the order.
        is_end: see above.
        life: what is allocated.
    """

    __slots__ = ("is_end", "life", "place")

    def __init__(self, place: Place, is_end: bool, life: Life) -> None:
        self.place = place
        self.is_end = is_end
        self.life = life


def reserve(step: RecordedStep, uses: list[Use], *, is_small: bool, arena_bytes: int = 0) -> Reserved:
    """Return what an allocator reserves that performs a step until it is steady.

    Args:
        step: the recorded step, whose segments the allocator has, trimmed.
        uses: all allocations and their ends, in order.
        is_small: these are of small blocks.
        arena_bytes: of the segment that is reserved before the step, to be divided by it; 0: none.
    """
    allocator = SegmentAllocator()
    in_use = allocator.adopt(segment for segment in step.segments if segment.is_small == is_small)
    allocator.trim()
    if arena_bytes:
        allocator.reserve_arena(arena_bytes, step.main_stream)
    successors = [(life, step.successors[id(life)]) for life in step.lives if id(life) in step.successors]
    # What a step finds is what its successors have, which the last step has left.
    blocks = {life: in_use[successor.at] for life, successor in successors if successor.at in in_use}
    left = _left(allocator, blocks)
    before, peak = (0, 0), 0
    for _ in range(_MOST_STEPS):
        peak = _perform(uses, blocks, allocator)
        _begin_again(successors, uses, blocks, allocator)
        now, found, left = (allocator.reserved_bytes, allocator.arena_bytes), left, _left(allocator, blocks)
        if now == before or left == found:
            break
        before = now
    return Reserved(allocator.reserved_bytes, peak, allocator.arena_bytes)


def _perform(uses: list[Use], blocks: dict[Life, Block], allocator: SegmentAllocator) -> int:
    """Perform the allocations of a step; return the peak of allocated bytes."""
    peak = allocator.allocated_bytes
    for use in uses:
        life = use.life
        if not use.is_end:
            blocks[life] = allocator.allocate(life.nbytes, life.stream)
            peak = max(peak, allocator.allocated_bytes)
        elif life in blocks:
            allocator.free(blocks.pop(life))
    return peak


def _begin_again(
    successors: list[tuple[Life, Life]], uses: list[Use], blocks: dict[Life, Block], allocator: SegmentAllocator
) -> None:
    """Pass what a step leaves behind on to the next one; free what no step would find."""
    for life, successor in successors:
        if successor in blocks:
            blocks[life] = blocks.pop(successor)
    for use in uses:
        if not use.is_end and use.life in blocks:
            allocator.free(blocks.pop(use.life))


def _left(allocator: SegmentAllocator, blocks: dict[Life, Block]) -> tuple[int, set[tuple[int, int]], dict[Life, int]]:
    """Return all by which what the next step comes to can differ."""
    return allocator.reserved_bytes, allocator.free_parts(), {life: block.at for life, block in blocks.items()}
