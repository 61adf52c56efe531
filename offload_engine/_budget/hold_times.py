# SPDX-License-Identifier: Apache-2.0
"""`HoldTimes`: takes the time of steps that hold a decision."""

from __future__ import annotations

from typing import Final

_NUM_STEPS: Final = 3


class HoldTimes:
    """Takes the shortest time of the first steps that hold.

    Steps that verify also reserve memory. So do those of other pipeline stages, which may verify for longer, and which
    the first steps then wait for.

    Attributes:
        num_awaited: number of steps that are still to be timed.
    """

    def __init__(self) -> None:
        self.num_awaited: int = 0
        self._shortest_ms = float("inf")

    def begin(self) -> None:
        """Await steps: a decision has begun to hold."""
        self.num_awaited, self._shortest_ms = _NUM_STEPS, float("inf")

    def end(self) -> None:
        """Await none any more: the decision is void."""
        self.num_awaited = 0

    def note(self, milliseconds: float) -> float | None:
        """Note the time of a step that was awaited; return the shortest once it is the last of them."""
        self.num_awaited -= 1
        self._shortest_ms = min(self._shortest_ms, milliseconds)
        return None if self.num_awaited else self._shortest_ms
