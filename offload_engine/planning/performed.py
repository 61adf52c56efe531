# SPDX-License-Identifier: Apache-2.0
"""Performs the allocations of a step with an imitated allocator, until it reserves no more."""

from __future__ import annotations

from collections.abc import Mapping
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


class Use(NamedTuple):
    """An allocation, or the end of one."""

    place: Place
    is_end: bool
    life: Life


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
    blocks = _blocks_at_begin(step, in_use)
    before, peak = (0, 0), 0
    for _ in range(_MOST_STEPS):
        peak = allocator.allocated_bytes
        for _, is_end, life in uses:
            if not is_end:
                blocks[id(life)] = allocator.allocate(life.nbytes, life.stream)
                peak = max(peak, allocator.allocated_bytes)
            elif id(life) in blocks:
                allocator.free(blocks.pop(id(life)))
        _begin_again(step, uses, blocks, allocator)
        now = allocator.reserved_bytes, allocator.arena_bytes
        if now == before:
            break
        before = now
    return Reserved(allocator.reserved_bytes, peak, allocator.arena_bytes)


def _blocks_at_begin(step: RecordedStep, in_use: Mapping[int, Block]) -> dict[int, Block]:
    """Return the blocks of lives that a step finds: those of their successors, which the last step has left."""
    found = {}
    for life in step.lives:
        successor = step.successors.get(id(life))
        if successor is not None and successor.at in in_use:
            found[id(life)] = in_use[successor.at]
    return found


def _begin_again(step: RecordedStep, uses: list[Use], blocks: dict[int, Block], allocator: SegmentAllocator) -> None:
    """Pass what a step leaves behind on to the next one; free what no step would find."""
    for life in step.lives:
        successor = step.successors.get(id(life))
        if successor is not None and id(successor) in blocks:
            blocks[id(life)] = blocks.pop(id(successor))
    for _, is_end, life in uses:
        if not is_end and id(life) in blocks:
            allocator.free(blocks.pop(id(life)))
