# SPDX-License-Identifier: Apache-2.0
"""`Idleness`: decides whether a step that moves nothing may run as without an engine."""

from __future__ import annotations

from typing import Final

from offload_engine.planning.choose import Chosen

_ALIKE: Final = 65 / 64
_LEAST_STEPS: Final = 5
_GROWN: Final = 33 / 32


class Idleness:
    """Learns whether all steps save equally many bytes.

    A group that is not opened cannot leave in the step in which it grows. So a step runs without groups only if all
    steps so far have saved equally many bytes, and if one that holds a 32nd more would still be within the budget.
    (One that grows by less than an eighth stays in any case.)

    Args:
        is_measured: the memory of the process can be measured without groups.
    """

    def __init__(self, is_measured: bool) -> None:
        self.is_measured: bool = is_measured
        self._num_steps = 0
        self._least = float("inf")
        self._most = 0.0

    def note(self, chunk_bytes: float) -> None:
        """Note what a chunk has saved, on average, in a step that is over; 0 where there were no groups."""
        if chunk_bytes:
            self._num_steps += 1
            self._least, self._most = min(self._least, chunk_bytes), max(self._most, chunk_bytes)

    def allows(self, chosen: Chosen | None, budget_bytes: int) -> bool:
        """Return whether steps with this decision need no groups."""
        if chosen is None or chosen.best.num_moves or chosen.best.recomputed_bytes:
            return False
        is_steady = self._num_steps >= _LEAST_STEPS and self._most <= _ALIKE * self._least
        return self.is_measured and is_steady and _GROWN * chosen.best.held_bytes <= budget_bytes
