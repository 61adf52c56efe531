"""`UnawaitedCopies`: copy-ins that the compute stream has not been made to wait for."""

from __future__ import annotations

from typing import Any

Event = Any


class UnawaitedCopies:
    """Events of copy-ins that run ahead of their use.

    A copy-out into bytes that such a copy reads would have to wait for it, and the two would not run side by side, so
    the pool lends these bytes last.
    """

    def __init__(self) -> None:
        self._events: dict[int, Event] = {}  # by id: events need not be hashable

    def add(self, event: Event) -> None:
        """Record a copy-in that was just issued."""
        self._events[id(event)] = event

    def discard(self, event: Event) -> None:
        """Forget a copy-in that compute waits for, or that is not needed any more. Idempotent."""
        self._events.pop(id(event), None)

    def __len__(self) -> int:
        return len(self._events)

    def has(self, event: Event) -> bool:
        """Return whether compute has yet to be made to wait for `event`."""
        return id(event) in self._events
