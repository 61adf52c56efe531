# SPDX-License-Identifier: Apache-2.0
"""`Slots`: owns the device memory, part of their graphs', from which captured backwards read what has left."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload_engine._devices.regions import storage_at
from offload_engine.errors import OffloadError

Allocate = Callable[[int], torch.Tensor]


class Slot:
    """Memory from which one backward reads; free for another as soon as no tensor over it is left.

    Args:
        buffer: its memory.
        number: of the capture that runs, and may have used these bytes before.

    Attributes:
        nbytes: its size.
        last_used: number of the last capture that used its bytes.
    """

    def __init__(self, buffer: torch.Tensor, number: int) -> None:
        self.nbytes: int = buffer.nbytes
        self.last_used: int = number
        self._buffer = buffer
        self._taken: list[tuple[int, int]] = []  # begin and end of each range that the running capture has taken
        self._storages: list[torch.UntypedStorage] = []  # of the running capture
        self._left: list[StorageWeakRef] = []  # of the last user, while a tensor holds them, as in a stash of inputs

    def take(self, nbytes: int, offset: int, alignment: int) -> torch.UntypedStorage:
        """Return a storage over the bytes at `offset`, or else over the first free ones.

        Raises:
            OffloadError: if there is no room.
        """
        behind = [_round_up(end, alignment) for _, end in self._taken]
        found = [begin for begin in (offset, 0, *behind) if self._has_free(begin, begin + nbytes)]
        if not found:
            raise OffloadError(
                f"a captured backward reads more than the {self.nbytes:,} bytes that any one captured forward has "
                "saved: capture the backward of each forward separately, as make_graphed_callables does"
            )
        self._taken.append((found[0], found[0] + nbytes))
        storage = storage_at(self._buffer.data_ptr() + found[0], nbytes, self._buffer.device)
        self._storages.append(storage)
        return storage

    def _has_free(self, begin: int, end: int) -> bool:
        return end <= self.nbytes and all(end <= taken[0] or taken[1] <= begin for taken in self._taken)

    def end_capture(self, number: int) -> None:
        """Note that a capture has ended, which used this slot if it has taken anything from it."""
        self._left += [StorageWeakRef(storage) for storage in self._storages]
        if self._left:
            self.last_used = number
        self._storages.clear()
        self._left = [left for left in self._left if not left.expired()]
        self._taken.clear()

    @property
    def is_free(self) -> bool:
        """Return whether no tensor of its last user is left."""
        return not self._left


class Slots:
    """Owns the slots, all of one size.

    A slot is allocated at the end of a capture, inside it: bytes that its graph may have used, and what runs behind its
    replay does not. So a slot may be filled from that replay on. Until it has been read no other graph uses the bytes.

    Args:
        allocate: returns a tensor of this many bytes, in the memory of the graph that is being captured.
        alignment: alignment of each storage in a slot, in bytes.
        num_free: number of free slots when a backward is captured. It takes one, which is filled while the backwards
            before it may still read the others.

    Attributes:
        nbytes: the most bytes that all slots had at one time.
    """

    def __init__(self, allocate: Allocate, alignment: int, num_free: int) -> None:
        self.nbytes: int = 0
        self._allocate = allocate
        self._num_free = num_free
        self._alignment = alignment
        self._all: list[Slot] = []
        self._slot_bytes = 0
        self._current: Slot | None = None  # of the running capture
        self._current_after = -1

    def size_of(self, sizes: list[int]) -> int:
        """Return the bytes that storages of these sizes take in a slot."""
        return sum(_round_up(nbytes, self._alignment) for nbytes in sizes)

    def reserve(self, nbytes: int) -> None:
        """Make each new slot have at least `nbytes` bytes."""
        self._slot_bytes = max(self._slot_bytes, nbytes)

    def take(self, nbytes: int, offset: int) -> tuple[torch.UntypedStorage, int]:
        """Return a storage for the running capture, and the number of the last capture that used its bytes.

        Args:
            nbytes: size of the storage.
            offset: preferred offset in the slot, a multiple of the alignment.

        Raises:
            OffloadError: if no slot has room.
        """
        if self._current is None:
            free = [slot for slot in self._all if slot.is_free]
            if not free:
                raise OffloadError(
                    "a captured graph reads what two others have saved, or one, after it has saved itself: capture "
                    "each forward and the backward of each by itself, as make_graphed_callables does"
                )
            self._current = min(free, key=lambda slot: slot.last_used)
            self._current_after = self._current.last_used
        return self._current.take(nbytes, offset, self._alignment), self._current_after

    def free(self) -> None:
        """Let the running capture, and those behind it, use the bytes of all slots that are free."""
        self._all = [slot for slot in self._all if slot is self._current or not slot.is_free]

    def close(self) -> None:
        """Release all slots."""
        self._all, self._current, self.nbytes = [], None, 0

    def end_capture(self, number: int) -> None:
        """Make free slots where there are too few, at the end of a capture and inside it."""
        self._current = None
        for slot in self._all:
            slot.end_capture(number)
        self._all = [slot for slot in self._all if slot.nbytes >= self._slot_bytes or not slot.is_free]
        free = sum(slot.is_free for slot in self._all)
        if self._slot_bytes:
            self._all += [Slot(self._allocate(self._slot_bytes), number) for _ in range(free, self._num_free)]
        self.nbytes = max(self.nbytes, sum(slot.nbytes for slot in self._all))


def _round_up(nbytes: int, alignment: int) -> int:
    return (nbytes + alignment - 1) & -alignment
