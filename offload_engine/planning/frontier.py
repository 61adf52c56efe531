# SPDX-License-Identifier: Apache-2.0
"""Finds the steps worth showing of many."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

S = TypeVar("S")


def frontier(steps: Iterable[S], held_bytes_and_ms: Callable[[S], tuple[int, float]]) -> tuple[S, ...]:
    """Return the steps that no other beats in both memory and time, ordered by memory."""
    found: list[S] = []
    shortest_ms = float("inf")
    for step in sorted(steps, key=held_bytes_and_ms):
        step_ms = held_bytes_and_ms(step)[1]
        if step_ms < shortest_ms:
            found.append(step)
            shortest_ms = step_ms
    return tuple(found)
