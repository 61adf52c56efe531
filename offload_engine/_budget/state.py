# SPDX-License-Identifier: Apache-2.0
"""The states of a budget.

    FLOOR -> MEASURE -> VERIFY -> HOLD
               ^---------------------'     what a step does has changed

FLOOR and MEASURE offload everything. VERIFY runs as decided, and corrects the model of memory by what it measures. A
decision that was made before leads from FLOOR to HOLD directly.
"""

from __future__ import annotations

import enum
from typing import Final


class State(enum.Enum):
    """What the next step is for."""

    FLOOR = enum.auto()
    """Everything is offloaded, until an optimizer has stepped, and for one step more."""
    MEASURE = enum.auto()
    """Everything is offloaded, and measured."""
    VERIFY = enum.auto()
    """A decision is in force, and compared with what the step takes."""
    HOLD = enum.auto()
    """The decision holds, and is watched."""


_FOLLOWING: Final = {
    State.FLOOR: (State.MEASURE, State.HOLD),
    State.MEASURE: (State.VERIFY, State.HOLD),
    State.VERIFY: (State.HOLD, State.MEASURE),
    State.HOLD: (State.MEASURE, State.VERIFY),
}


def check_following(before: State, to: State) -> None:
    """Check a transition.

    Raises:
        AssertionError: if there is none.
    """
    if to not in _FOLLOWING[before]:
        expected = ", ".join(state.name for state in _FOLLOWING[before])
        raise AssertionError(f"a budget cannot go from {before.name} to {to.name}; expected {expected}")
