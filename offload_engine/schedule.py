# SPDX-License-Identifier: Apache-2.0
"""Computes the order in which one rank runs the forwards and backwards of its model chunks.

The engine prefetches in this order. It is computed in each step from the pipeline's shape, so there is no warm-up step
and no state to invalidate when the number of microbatches changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Literal, NamedTuple

_NUMBER = "0|[1-9][0-9]*"  # no leading zeros: one text for one action
_ACTION = re.compile(rf"(?P<kind>[FB])(?P<stage>{_NUMBER})\.(?P<microbatch>{_NUMBER})")


class ChunkKey(NamedTuple):
    """One forward of one model chunk: virtual stage (0 without virtual stages) and microbatch, both from 0."""

    stage: int
    microbatch: int


class Action(NamedTuple):
    """Run the forward ("F") or the backward ("B") of one chunk."""

    kind: Literal["F", "B"]
    chunk: ChunkKey


def no_pipelining(num_microbatches: int, overlap_expert_comm: bool = False) -> list[Action]:
    """Return forward and backward of each microbatch in turn (gradient accumulation): F0 B0 F1 B1 ...

    Args:
        num_microbatches: microbatches of a step.
        overlap_expert_comm: each backward runs together with the next microbatch's forward (megatron-core's
            `overlap_moe_expert_parallel_comm`): F0 F1 B0 F2 B1 ...

    Raises:
        ValueError: if `num_microbatches` is not positive.
    """
    _check_positive(num_microbatches=num_microbatches)
    return _overlapped([ChunkKey(0, m) for m in range(num_microbatches)], num_warmup=int(overlap_expert_comm))


def one_forward_one_backward(num_stages: int, stage: int, num_microbatches: int) -> list[Action]:
    """Return 1F1B without virtual stages, on the rank that holds pipeline stage `stage` of `num_stages`.

    Raises:
        ValueError: if a size is not positive or the stage is outside the pipeline.
    """
    _check_positive(num_stages=num_stages, num_microbatches=num_microbatches)
    _check_stage(stage, num_stages)
    return _overlapped([ChunkKey(0, m) for m in range(num_microbatches)], num_warmup=num_stages - stage - 1)


def interleaved(
    num_stages: int,
    stage: int,
    num_virtual_stages: int,
    num_microbatches: int,
    group_size: int | None = None,
    overlap_expert_comm: bool = False,
) -> list[Action]:
    """Return interleaved 1F1B, on the rank that holds pipeline stage `stage` of `num_stages`.

    Args:
        num_stages: pipeline-parallel size; at least 2, because a single stage never interleaves.
        stage: pipeline rank.
        num_virtual_stages: model chunks of each rank.
        num_microbatches: microbatches of a step, for each model chunk.
        group_size: microbatches that one model chunk runs before the next chunk's turn (megatron-core's
            `microbatch_group_size_per_vp_stage`). None: `num_stages`.
        overlap_expert_comm: forwards and backwards run together, which takes one more forward in the warm-up
            (megatron-core's `overlap_moe_expert_parallel_comm`).

    Raises:
        ValueError: if megatron-core's schedule rejects the sizes, or the stage is outside the pipeline.
    """
    group_size = num_stages if group_size is None else group_size
    _check_positive(num_virtual_stages=num_virtual_stages, num_microbatches=num_microbatches)
    _check_stage(stage, num_stages)
    _check_interleaved(num_stages, num_microbatches, group_size)
    num_warmup = (num_virtual_stages - 1) * group_size + (num_stages - stage - 1) * 2 + overlap_expert_comm
    forwards = _forward_order(num_virtual_stages, num_microbatches, group_size)
    backwards = [ChunkKey(num_virtual_stages - 1 - key.stage, key.microbatch) for key in forwards]
    return _overlapped(forwards, num_warmup, backwards)


def format_actions(actions: Iterable[Action]) -> str:
    """Return the actions as text, `F0.3 B1.2`: kind, virtual stage, microbatch."""
    return " ".join(f"{action.kind}{action.chunk.stage}.{action.chunk.microbatch}" for action in actions)


def parse_actions(text: str) -> list[Action]:
    """Parse actions; the exact inverse of `format_actions`, with any white space between actions.

    Raises:
        ValueError: if a word is not an action; names the first one.
    """
    return [_parse_action(word) for word in text.split()]


def validate_actions(actions: Iterable[Action]) -> None:
    """Check that each chunk runs forward once and then backward once.

    Raises:
        ValueError: if one does not; names the action that is out of place.
    """
    seen: dict[Action, int] = {}
    for position, action in enumerate(actions):
        where = f"{format_actions([action])} at position {position}"
        if action in seen:
            raise ValueError(f"{where} ran before, at position {seen[action]}")
        if action.kind == "B" and Action("F", action.chunk) not in seen:
            raise ValueError(f"{where} runs before its forward")
        seen[action] = position
    for action in seen:
        if action.kind == "F" and Action("B", action.chunk) not in seen:
            raise ValueError(f"{format_actions([action])} at position {seen[action]} has no backward")


def count_alive(actions: Iterable[Action]) -> list[int]:
    """Return, after each action, how many chunks wait for their backward (their activations are alive)."""
    return list(accumulate(1 if action.kind == "F" else -1 for action in actions))


def backward_at_once(actions: Sequence[Action], is_combined: bool = False) -> frozenset[ChunkKey]:
    """Return the chunks whose backward follows their forward at once.

    Args:
        actions: of one rank.
        is_combined: a forward and the backward after it run together, unless they are of the same chunk. (A pipeline
            too short to combine any is treated the same way: it keeps the last groups of one more chunk.)
    """
    steps: list[list[Action]] = []
    for action in actions:
        is_behind_forward = bool(steps) and steps[-1][0].kind == "F" and len(steps[-1]) == 1
        if is_combined and action.kind == "B" and is_behind_forward and steps[-1][0].chunk != action.chunk:
            steps[-1].append(action)
        else:
            steps.append([action])
    pairs = zip(steps, steps[1:], strict=False)
    return frozenset(a.chunk for step, following in pairs for a in step if Action("B", a.chunk) in following)


def _forward_order(num_virtual_stages: int, num_microbatches: int, group_size: int) -> list[ChunkKey]:
    """Order the forwards: each group of microbatches through all virtual stages; the last group may be smaller."""
    return [
        ChunkKey(virtual_stage, microbatch)
        for first in range(0, num_microbatches, group_size)
        for virtual_stage in range(num_virtual_stages)
        for microbatch in range(first, min(first + group_size, num_microbatches))
    ]


def _overlapped(
    forwards: Sequence[ChunkKey], num_warmup: int, backwards: Sequence[ChunkKey] | None = None
) -> list[Action]:
    """Return `num_warmup` forwards alone, then a forward and a backward in turn, then the remaining backwards.

    Args:
        backwards: chunks in the order of their backward; None: as their forwards.
    """
    num_warmup = min(num_warmup, len(forwards))
    ahead = [Action("F", chunk) for chunk in forwards]
    behind = [Action("B", chunk) for chunk in (forwards if backwards is None else backwards)]
    steady = chain.from_iterable(zip(ahead[num_warmup:], behind, strict=False))  # the forwards run out first
    return [*ahead[:num_warmup], *steady, *behind[len(ahead) - num_warmup :]]


def _parse_action(word: str) -> Action:
    match = _ACTION.fullmatch(word)
    if match is None:
        raise ValueError(f"not an action: {word!r}; expected F or B, virtual stage, dot, microbatch, as in 'F0.3'")
    kind: Literal["F", "B"] = "F" if match["kind"] == "F" else "B"
    return Action(kind, ChunkKey(int(match["stage"]), int(match["microbatch"])))


def _check_positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def _check_stage(stage: int, num_stages: int) -> None:
    if not 0 <= stage < num_stages:
        raise ValueError(f"stage must be in [0, {num_stages - 1}] for num_stages={num_stages}, got {stage}")


def _check_interleaved(num_stages: int, num_microbatches: int, group_size: int) -> None:
    if num_stages < 2:
        raise ValueError(f"interleaving needs num_stages of at least 2, got {num_stages}: use no_pipelining()")
    if not num_stages <= group_size <= num_microbatches:
        raise ValueError(
            f"group_size must be in [num_stages={num_stages}, num_microbatches={num_microbatches}], got {group_size}"
        )
    rest = num_microbatches % group_size
    if 0 < rest < num_stages:
        raise ValueError(
            f"num_microbatches={num_microbatches} leaves a last group of {rest} after groups of {group_size}: "
            f"that must be 0 or at least num_stages={num_stages}"
        )
