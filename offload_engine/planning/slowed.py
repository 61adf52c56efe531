# SPDX-License-Identifier: Apache-2.0
"""Times of a step whose compute is slower than it was simulated with, while its copies take as long.

A GPU that idles less clocks lower. Then compute waits less for copies, because they have more time.
"""

from __future__ import annotations

from typing import Final

MOST_SLOWER: Final = 9 / 8
"""With this factor steps are simulated once more, to find out how much less they wait; beyond, they wait as long."""
_NUM_TRIES: Final = 30


def factor_of(busy_ratio: float, busy: float) -> float:
    """Return how many times as long compute takes in a step that avoids the share `busy` of the floor's waits."""
    return 1.0 + (busy_ratio - 1.0) * busy


def slowed_ms(milliseconds: float, hidden_ms: float, slower: float) -> float:
    """Return how long a step takes whose compute takes `slower` times as long.

    Args:
        milliseconds: that it takes as simulated.
        hidden_ms: by how much less it waits for copies, per unit of the factor, in units of the slower compute.
        slower: the factor.
    """
    return slower * (milliseconds - hidden_ms * (min(slower, MOST_SLOWER) - 1.0))


def unslowed_ms(step_ms: float, hidden_ms: float, slower: float) -> float:
    """Return how long a step takes as simulated; the inverse of `slowed_ms`."""
    return step_ms / slower + hidden_ms * (min(slower, MOST_SLOWER) - 1.0)


def slower_of(milliseconds: float, hidden_ms: float, measured_ms: float) -> float:
    """Return the factor with which a step takes as long as measured; see `slowed_ms` for the other arguments."""
    found = measured_ms / milliseconds
    for _ in range(_NUM_TRIES):
        found = measured_ms / (milliseconds - hidden_ms * (min(found, MOST_SLOWER) - 1.0))
    return found
