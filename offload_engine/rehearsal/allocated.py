# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that an allocator would have allocated and reserved, over a step of hollow tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from offload_engine.planning.replay import ENDLESS
from offload_engine.planning.segments import (
    SPARE_SHARE,
    SPARE_SHARE_INEXACT,
    Block,
    SegmentAllocator,
    rounded,
    with_spare,
)


class _Alive(NamedTuple):
    storage: weakref.ref[torch.UntypedStorage]
    nbytes: int
    block: Block | None
    in_arena: Block | None


class Wasted(NamedTuple):
    """What an allocator reserves in vain."""

    nbytes: int
    in_arena: int
    """If an arena is reserved before each step, as under a budget."""
    in_large_arena: int
    """If that has as much to spare as arenas of pipelines have where there is room."""


class AllocatedBytes:
    """Counts the bytes of noted storages until they are freed.

    A storage that is resized, to zero or back, must be noted again.

    Args:
        on_free: called with the `_cdata` of a noted storage that is freed, because another storage may have it next.

    Attributes:
        segments: what the allocator reserves for them.
        in_arena: the same if an arena is reserved before a step, as under a budget; None before `reserve_arena`.
    """

    def __init__(self, on_free: Callable[[int], None]) -> None:
        self.segments: SegmentAllocator = SegmentAllocator()
        self.in_arena: SegmentAllocator | None = None
        self._on_free = on_free
        self.nbytes = 0
        """Now."""
        self.peak_bytes = 0
        """Peak since `reset_peak`."""
        self._alive: dict[int, _Alive] = {}

    def wasted_beside(self, peak_bytes: int) -> Wasted:
        """Return what is reserved beside a peak of allocated bytes: of the arena, what was used and some to spare."""
        arena = self.in_arena
        assert arena is not None
        others = arena.reserved_bytes - ENDLESS - peak_bytes
        spared = (others + with_spare(arena.arena_bytes, share) for share in (SPARE_SHARE, SPARE_SHARE_INEXACT))
        return Wasted(self.segments.reserved_bytes - peak_bytes, *spared)

    def reserve_arena(self) -> None:
        """Count from now on also what is reserved if all that is allocated next has room in an arena."""
        self.in_arena = SegmentAllocator()
        for key, alive in self._alive.items():
            self._alive[key] = alive._replace(in_arena=_allocate(self.in_arena, alive.nbytes))
        self.in_arena.reserve_arena(ENDLESS)

    def reset_peak(self) -> None:
        """Forget the peak."""
        self.peak_bytes = self.nbytes

    def note(self, storage: torch.UntypedStorage) -> bool:
        """Note a storage, or its new size; return whether it was unknown."""
        key, nbytes = storage._cdata, rounded(storage.nbytes())
        known = self._alive.get(key)
        if known is None:
            self._alive[key] = self._add(weakref.ref(storage, partial(self._forget, key)), nbytes)
            return True
        if nbytes != known.nbytes:
            self._subtract(known)
            self._alive[key] = self._add(known.storage, nbytes)
        return False

    def _forget(self, key: int, _: object) -> None:
        self._subtract(self._alive.pop(key))
        self._on_free(key)

    def _add(self, storage: weakref.ref[torch.UntypedStorage], nbytes: int) -> _Alive:
        self.nbytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.nbytes)
        return _Alive(storage, nbytes, _allocate(self.segments, nbytes), _allocate(self.in_arena, nbytes))

    def _subtract(self, alive: _Alive) -> None:
        self.nbytes -= alive.nbytes
        if alive.block is not None:
            self.segments.free(alive.block)
        if self.in_arena is not None and alive.in_arena is not None:
            self.in_arena.free(alive.in_arena)


def _allocate(allocator: SegmentAllocator | None, nbytes: int) -> Block | None:
    return allocator.allocate(nbytes) if allocator is not None and nbytes else None
