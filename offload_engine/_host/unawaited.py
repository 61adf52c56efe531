# SPDX-License-Identifier: Apache-2.0
"""`UnawaitedCopies`: copy-ins that no compute stream waits for yet."""

from __future__ import annotations

from typing import Any

Event = Any


class UnawaitedCopies:
    """Holds the events of copy-ins that run ahead of their use.

    A copy-out into bytes that such a copy reads has to wait for it, and the two cannot overlap. So the pool lends these
    bytes last.
    """

    def __init__(self) -> None:
        self._events: dict[int, Event] = {}  # by id: events need not be hashable

    def add(self, event: Event) -> None:
        """Record a copy-in that was just issued."""
        self._events[id(event)] = event

    def forget(self, event: Event) -> None:
        """Forget a copy-in that compute now waits for, or that is no longer needed. Idempotent."""
        self._events.pop(id(event), None)

    def clear(self) -> None:
        """Forget all copy-ins; call it when none is in flight."""
        self._events = {}

    def __len__(self) -> int:
        return len(self._events)

    def has(self, event: Event) -> bool:
        """Return whether no compute stream waits for `event` yet."""
        return id(event) in self._events
