# SPDX-License-Identifier: Apache-2.0
"""Shortens steps of many microbatches, so that a choice among many of them takes little time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from typing import Final

from offload_engine.schedule import Action

_STEADY: Final = 1
"""Microbatches of a shortened step beside those that fill the pipeline."""
_WORTHWHILE: Final = 2
"""How many times the microbatches of a shortened step the whole one must have."""


def shortened(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Return the actions of a step that fills and drains as this one, but has few microbatches in between.

    Left out are the last microbatches, in whole groups: an interleaved schedule runs as many of one virtual stage in a
    row as there are stages. A step that would not have half the microbatches stays as it is.
    """
    num = _num_alive(actions) + _STEADY
    group = sum(1 for _ in takewhile(lambda action: (action.kind, action.chunk.stage) == _first(actions), actions))
    num += -num % max(1, group)
    microbatches = list(dict.fromkeys(action.chunk.microbatch for action in actions))
    if _WORTHWHILE * num > len(microbatches):
        return tuple(actions)
    few = frozenset(microbatches[:num])
    return tuple(action for action in actions if action.chunk.microbatch in few)


def _first(actions: Sequence[Action]) -> tuple[str, int]:
    return actions[0].kind, actions[0].chunk.stage


def _num_alive(actions: Sequence[Action]) -> int:
    """Return the most microbatches that wait for a backward at once."""
    alive: Counter[int] = Counter()
    most = 0
    for kind, chunk in actions:
        alive[chunk.microbatch] += 1 if kind == "F" else -1
        if not alive[chunk.microbatch]:
            del alive[chunk.microbatch]
        most = max(most, len(alive))
    return most
