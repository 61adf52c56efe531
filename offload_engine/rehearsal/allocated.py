# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that an allocator would have allocated and reserved, over a step of hollow tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from offload_engine.planning.segments import Block, SegmentAllocator, rounded


class _Alive(NamedTuple):
    storage: weakref.ref[torch.UntypedStorage]
    nbytes: int
    block: Block | None


class AllocatedBytes:
    """Counts the bytes of noted storages until they are freed.

    A storage that is resized, to zero or back, must be noted again.

    Args:
        on_free: called with the `_cdata` of a noted storage that is freed, because another storage may have it next.

    Attributes:
        segments: what the allocator reserves for them.
    """

    def __init__(self, on_free: Callable[[int], None]) -> None:
        self.segments: SegmentAllocator = SegmentAllocator()
        self._on_free = on_free
        self.nbytes = 0
        """Now."""
        self.peak_bytes = 0
        """Peak since `reset_peak`."""
        self._alive: dict[int, _Alive] = {}

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
        return _Alive(storage, nbytes, self.segments.allocate(nbytes) if nbytes else None)

    def _subtract(self, alive: _Alive) -> None:
        self.nbytes -= alive.nbytes
        if alive.block is not None:
            self.segments.free(alive.block)
