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
"""Microbatches of a shortened step beside those that fill the pipeline, at the least."""
_ENOUGH_EVENTS: Final = 12_000
"""Of a shortened record of a pipeline: as many microbatches stay as have no more."""
_WORTHWHILE: Final = 2
"""How many times the microbatches of a shortened step the whole one must have."""


def shortened(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Return the actions of a step that fills and drains as this one, but has few microbatches in between.

    A step that would have more than half of the microbatches stays as it is.

    Args:
        actions: of the step.
    """
    few = _beginning(actions, _num_alive(actions) + _STEADY)
    return few if _WORTHWHILE * len(few) <= len(actions) else tuple(actions)


def _beginning(actions: Sequence[Action], num: int) -> tuple[Action, ...]:
    """Return the actions of the first microbatches, `num` or a few more.

    Left out are whole groups: an interleaved schedule runs as many of one virtual stage in a row as there are stages.
    """
    group = sum(1 for _ in takewhile(lambda action: (action.kind, action.chunk.stage) == _first(actions), actions))
    num += -num % max(1, group)
    few = frozenset(list(dict.fromkeys(action.chunk.microbatch for action in actions))[:num])
    return tuple(action for action in actions if action.chunk.microbatch in few)


def _filling(actions: Sequence[Action], least: int) -> tuple[Action, ...]:
    """Return the actions of the first microbatches, so many that the pipeline is not drained as soon as it is full."""
    shorter = (_beginning(actions, num) for num in range(least, 1 + least + _STEADY))
    return next((few for few in shorter if _is_steady(few)), tuple(actions))


def _is_steady(actions: Sequence[Action]) -> bool:
    """Return whether a forward follows a backward."""
    kinds = "".join(action.kind for action in actions)
    return "BF" in kinds


def shortened_record(step: RecordedStep, job: Job) -> RecordedStep:
    """Return what was recorded of two microbatches, the first and the largest other one; in a pipeline, of the first.

    Each microbatch finds the memory as the one before it has, so the allocator reserves the same for both. (24 of them
    on an H200: to the byte in 29 decisions, with an arena and without one, in a twentieth of the time; what all have
    allocated at once differs by 11 KiB.) Where experts have other numbers of tokens in each, the first one and the
    largest others stay, as many as there is time for.

    Where several are alive at once, it takes longer until one repeats the other: those stay that fill the pipeline, and
    as many more as there is time for. (4 of 8 on an H200, of which 2 are alive at once: in nine decisions of 18.6 to
    60.2 GB at most 110 MiB less or 42 MiB more, interleaved 0 to 526 MiB less, a ninetieth. Of the smallest models in
    tests it is up to a nineteenth.)

    Args:
        step: the whole step.
        job: what ran in it.
    """
    first, *others = dict.fromkeys(action.chunk.microbatch for action in job.actions)
    num_alive = _num_alive(job.actions)
    is_pipeline = num_alive > 1
    are_alike = step.is_like(job.shapes)
    if not are_alike:
        step = replace(step, is_exact=False)
    enough = _ENOUGH_EVENTS * (1 + len(others)) // max(1, step.most_events)
    if is_pipeline:
        kept = {action.chunk.microbatch for action in _filling(job.actions, max(enough, num_alive))}
    elif shortened(job.actions) == job.actions:
        return step
    else:
        sizes = _saved_bytes(step)
        num = 1 if are_alike else max(1, enough - 1)
        kept = {first, *sorted(others, key=lambda microbatch: -sizes[microbatch])[:num]}
    left_out = frozenset(others) - kept
    if not left_out:
        return step
    spans = _spans_of(left_out, step, job)
    if not spans:
        return step
    lives = [life for life in step.lives if not _is_within(life, spans)]
    return replace(
        step,
        lives=lives,
        stored={group: stored for group, stored in step.stored.items() if group.chunk.microbatch not in left_out},
        left_out=left_out,
        is_exact=are_alike and not is_pipeline,
        most_events=round(step.most_events * len(lives) / len(step.lives)),
    )


def _saved_bytes(step: RecordedStep) -> Counter[int]:
    """Return how many bytes each microbatch has saved."""
    found: Counter[int] = Counter()
    for group, nbytes in step.sizes().items():
        found[group.chunk.microbatch] += nbytes
    return found


def _spans_of(microbatches: frozenset[int], step: RecordedStep, job: Job) -> list[tuple[int, int]]:
    """Return when these microbatches ran, from moment to moment, in order; nothing if that is not known."""
    boundaries = [step_boundaries([action], job.shapes)[0] for action in job.actions]
    moments = [step.moments.get(boundary, -1) for boundary in (*boundaries, Boundary(ITERATION_END))]
    spans: list[tuple[int, int]] = []
    for action, begin, end in zip(job.actions, moments, moments[1:], strict=False):
        if begin < 0 or end < 0:
            return []
        if action.chunk.microbatch not in microbatches:
            continue
        if spans and spans[-1][1] == begin:
            begin = spans.pop()[0]
        spans.append((begin, end))
    return spans


def _is_within(life: Life, spans: Sequence[tuple[int, int]]) -> bool:
    """Return whether a block was allocated in one of these spans, and free again in one, or in the same."""
    if life.ends is None:
        return False
    free = life.ends + life.lag
    return any(begin <= life.begins < end for begin, end in spans) and any(begin < free <= end for begin, end in spans)


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
