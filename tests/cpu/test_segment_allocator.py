# SPDX-License-Identifier: Apache-2.0
"""The imitation of torch's allocator: which block it takes, when it divides one, and what it reserves in vain."""

from __future__ import annotations

import random

import pytest

from offload_engine.rehearsal.allocator import Block, SegmentAllocator

MIB = 1 << 20


@pytest.mark.parametrize(
    ("nbytes", "reserved"),
    [(1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB, 12), (21 * MIB + 1, 22)],
)
def test_a_segment_has_the_size_of_its_class(nbytes: int, reserved: int) -> None:
    allocator = SegmentAllocator()
    block = allocator.allocate(nbytes)
    assert allocator.reserved_bytes == reserved * MIB and nbytes <= block.nbytes <= reserved * MIB


def test_a_request_takes_the_smallest_block_that_fits_and_leaves_the_rest() -> None:
    allocator = SegmentAllocator()
    large, small = allocator.allocate(96 * MIB), allocator.allocate(64 * MIB)
    allocator.free(large)
    allocator.free(small)
    first, second = allocator.allocate(40 * MIB), allocator.allocate(90 * MIB)
    assert allocator.reserved_bytes == 160 * MIB and (first.at, second.at) == (small.at, large.at)
    assert allocator.allocate(24 * MIB).at == small.at + 40 * MIB  # what was left of it
    assert second.nbytes == 90 * MIB and allocator.allocate(5 * MIB).at == large.at + 90 * MIB
    allocator.allocate(2 * MIB)
    assert allocator.reserved_bytes == 180 * MIB  # one MiB is left of the first, too little to divide


def test_neighbours_become_one_and_only_whole_segments_are_returned() -> None:
    allocator = SegmentAllocator()
    allocator.free(allocator.allocate(60 * MIB))
    parts = [allocator.allocate(20 * MIB) for _ in range(3)]
    for index in (0, 2, 1):
        allocator.free(parts[index])
    assert allocator.allocate(60 * MIB).nbytes == allocator.reserved_bytes == 60 * MIB
    kept = allocator.allocate(20 * MIB)
    allocator.free(allocator.allocate(30 * MIB))
    allocator.trim()
    assert allocator.reserved_bytes == 80 * MIB and kept.nbytes == 20 * MIB


def test_blocks_never_overlap() -> None:
    chance, allocator = random.Random(1), SegmentAllocator()
    held: list[Block] = []
    for _ in range(2_000):
        if held and chance.random() < 0.5:
            allocator.free(held.pop(chance.randrange(len(held))))
        else:
            held.append(allocator.allocate(chance.choice([512, 3_000, MIB, 3 * MIB, chance.randrange(1, 64 * MIB)])))
    held.sort(key=lambda block: block.at)
    assert all(a.at + a.nbytes <= b.at for a, b in zip(held, held[1:], strict=False))
    assert sum(block.nbytes for block in held) <= allocator.reserved_bytes
    for block in held:
        allocator.free(block)
    allocator.trim()
    assert allocator.reserved_bytes == 0
