# SPDX-License-Identifier: Apache-2.0
"""Ranks of one process, that agree."""

from __future__ import annotations

from threading import Barrier


class Meeting:
    """Ranks, one to a thread, that take the largest of each number."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = Barrier(num_ranks, timeout=60)
        self._said: list[tuple[int, ...]] = [()] * num_ranks

    def agree(self, rank: int, numbers: tuple[int, ...]) -> tuple[int, ...]:
        self._said[rank] = numbers
        self._barrier.wait()
        found = tuple(map(max, zip(*self._said, strict=True)))
        self._barrier.wait()
        return found
