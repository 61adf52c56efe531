# SPDX-License-Identifier: Apache-2.0
"""Shortens steps of many microbatches, so that a choice among many of them takes little time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Final

from offload_engine.planning.allocations import Life, RecordedStep
from offload_engine.planning.memory import Job
from offload_engine.planning.moves import ITERATION_END, Boundary
from offload_engine.planning.shapes import step_boundaries
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


def shortened_record(step: RecordedStep, job: Job) -> RecordedStep:
    """Return what was recorded of the microbatches of a shortened step; in a pipeline, the whole step.

    Each microbatch finds the memory as the one before it has, so the allocator reserves the same for both. (24 of them
    on an H200: equal to the byte in 29 decisions, with an arena and without one, in a twentieth of the time.) Where
    several are alive at once, it takes longer until one repeats the other.

    Args:
        step: the whole step.
        job: what ran in it.
    """
    few = {action.chunk.microbatch for action in shortened(job.actions)}
    others = [action for action in job.actions if action.chunk.microbatch not in few]
    if not others or _num_alive(job.actions) > 1:
        return step
    begin = step.moments.get(step_boundaries(others[:1], job.shapes)[0])
    end = step.moments.get(Boundary(ITERATION_END))
    if begin is None or end is None:
        return step
    lives = [life for life in step.lives if not _is_within(life, begin, end)]
    return replace(
        step,
        lives=lives,
        stored={group: stored for group, stored in step.stored.items() if group.chunk.microbatch in few},
        left_out=frozenset(action.chunk.microbatch for action in others),
        most_events=round(step.most_events * len(lives) / len(step.lives)),
    )


def _is_within(life: Life, begin: int, end: int) -> bool:
    """Return whether a block was allocated and free again between two moments."""
    return life.begins >= begin and life.ends is not None and life.ends + life.lag <= end


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
