# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that an allocator would have allocated, over a step of hollow tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Final

import torch

_ROUNDED_TO: Final = 512
"""Bytes to which CUDA's allocator rounds."""


class AllocatedBytes:
    """Counts the bytes of noted storages until they are freed.

    A storage that is resized, to zero or back, must be noted again.

    Args:
        on_free: called with the `_cdata` of a noted storage that is freed, because another storage may have it next.
    """

    def __init__(self, on_free: Callable[[int], None]) -> None:
        self._on_free = on_free
        self.nbytes = 0
        """Now."""
        self.peak_bytes = 0
        """Peak since `reset_peak`."""
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def reset_peak(self) -> None:
        """Forget the peak."""
        self.peak_bytes = self.nbytes

    def note(self, storage: torch.UntypedStorage) -> bool:
        """Note a storage, or its new size; return whether it was unknown."""
        key, nbytes = storage._cdata, -(-storage.nbytes() // _ROUNDED_TO) * _ROUNDED_TO
        known = self._alive.get(key)
        if known is not None:
            self._add(nbytes - known[1])
            self._alive[key] = known[0], nbytes
            return False
        self._alive[key] = weakref.ref(storage, partial(self._forget, key)), nbytes
        self._add(nbytes)
        return True

    def _forget(self, key: int, _: object) -> None:
        self._add(-self._alive.pop(key)[1])
        self._on_free(key)

    def _add(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.nbytes)
