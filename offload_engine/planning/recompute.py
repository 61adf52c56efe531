"""Recomputation as a choice: what it frees, and what it costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from offload_engine.planning.choices import Slot, slots_of
from offload_engine.planning.shapes import ChunkShape, GroupShape, Shapes


@dataclass(frozen=True)
class RecomputeOption:
    """What the model can recompute in one layer, instead of saving it.

    Raises:
        ValueError: if it replaces nothing, or frees or costs less than nothing.
    """

    name: str
    """Of what is recomputed."""
    replaces: frozenset[Slot]
    """The groups whose tensors are not saved, in one layer of one virtual stage."""
    freed_bytes: int
    """Of these groups, for one microbatch."""
    milliseconds: float
    """Of compute in the backward of one microbatch."""
    input_stays: bool = False
    """What is not freed, its input, is saved outside of groups, so it does not move."""

    def __post_init__(self) -> None:
        if not self.replaces or self.freed_bytes < 0 or self.milliseconds < 0:
            raise ValueError(f"{self}: it must replace a group, and neither free nor cost less than nothing")

    @property
    def ms_per_byte(self) -> float:
        """Return what it costs to free a byte."""
        return self.milliseconds / self.freed_bytes if self.freed_bytes else float("inf")


def options_of(options: Iterable[RecomputeOption], recomputed: Collection[Slot]) -> list[RecomputeOption]:
    """Return the options that a choice stands for: of those that overlap the largest, then the first."""
    left, found = set(recomputed), []
    for option in sorted(options, key=lambda option: -len(option.replaces)):
        if option.replaces <= left:
            left -= option.replaces
            found.append(option)
    return found


def back_in_backward(shapes: Shapes, options: Iterable[RecomputeOption]) -> dict[tuple[int, int], int]:
    """Return the bytes that are on the device again while the backward of a group runs, by virtual stage and index.

    A recomputation has all of its tensors at once.
    """
    found: dict[tuple[int, int], int] = {}
    for option in options:
        for stage, shape in enumerate(shapes):
            for index, slot in enumerate(slots_of(stage, shape.groups)):
                if slot in option.replaces:
                    found[stage, index] = option.freed_bytes
    return found


def with_recomputation(shapes: Shapes, options: Collection[RecomputeOption]) -> Shapes:
    """Return the shapes of chunks that recompute what `options` say: fewer bytes, longer backwards."""
    if not options:
        return shapes
    return tuple(_recomputing(stage, shape, options) for stage, shape in enumerate(shapes))


def _recomputing(stage: int, shape: ChunkShape, options: Iterable[RecomputeOption]) -> ChunkShape:
    groups = list(shape.groups)
    slots = slots_of(stage, groups)
    for option in options:
        freed, milliseconds = option.freed_bytes, option.milliseconds
        for index in reversed(range(len(groups))):  # its backward begins with the last of them
            if slots[index] not in option.replaces:
                continue
            group: GroupShape = groups[index]
            taken = min(freed, group.nbytes)
            groups[index] = dataclasses.replace(
                group,
                nbytes=group.nbytes - taken,
                backward_ms=group.backward_ms + milliseconds,
                stays=option.input_stays,
            )
            freed, milliseconds = freed - taken, 0.0
    return dataclasses.replace(shape, groups=tuple(groups))
