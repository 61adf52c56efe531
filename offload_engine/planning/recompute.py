# SPDX-License-Identifier: Apache-2.0
"""Describes recomputation as a choice: what it frees, and what it costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import median

from offload_engine.planning.choices import Choices, Slot, slots_of
from offload_engine.planning.shapes import ChunkShape, GroupShape, Shapes


@dataclass(frozen=True)
class RecomputeOption:
    """Something that the model can recompute in one layer, instead of saving it.

    Raises:
        ValueError: if it replaces nothing, or frees or costs less than nothing.
    """

    name: str
    """Name of the module that is recomputed."""
    replaces: frozenset[Slot]
    """The groups whose tensors are not saved, in one layer of one virtual stage."""
    freed_bytes: int
    """Bytes that these groups no longer save, for one microbatch."""
    milliseconds: float
    """Compute time that it adds to the backward of one microbatch."""
    comes_back: bool = True
    """The freed bytes are on the device again, each group's to the end of its backward; False if `output_bytes` has
    them, or if only saved bytes are measured."""
    output_bytes: int = 0
    """Computed again, and on the device until the backward of all these groups is over: what the module returns."""
    stops_early: bool = False
    """It is recomputed up to the last tensor that is saved, as by `torch.utils.checkpoint` without reentrance."""

    def __post_init__(self) -> None:
        if not self.replaces or min(self.freed_bytes, self.output_bytes, self.milliseconds) < 0:
            raise ValueError(f"{self}: it must replace a group; bytes and cost must not be negative")

    @property
    def ms_per_byte(self) -> float:
        """Return the cost of freeing a byte, in ms."""
        return self.milliseconds / self.freed_bytes if self.freed_bytes else float("inf")


def options_of(options: Iterable[RecomputeOption], recomputed: Collection[Slot]) -> list[RecomputeOption]:
    """Return the options that a choice stands for: of overlapping ones the largest, then the first."""
    left, found = set(recomputed), []
    for option in sorted(options, key=lambda option: -len(option.replaces)):
        if option.replaces <= left:
            left -= option.replaces
            found.append(option)
    return found


def cheapest_first(options: Iterable[RecomputeOption]) -> list[RecomputeOption]:
    """Return options that replace different groups, ordered by the cost of freeing a byte."""
    taken: set[Slot] = set()
    found = []
    for option in sorted(options, key=lambda option: option.ms_per_byte):
        if option.freed_bytes and taken.isdisjoint(option.replaces):
            taken |= option.replaces
            found.append(option)
    return found


def recomputing(options: Iterable[RecomputeOption]) -> Choices:
    """Return the choices by which these are recomputed, and all else may leave."""
    return Choices(recomputed=frozenset(slot for option in options for slot in option.replaces))


def evenly(options: Collection[RecomputeOption], share: float) -> list[RecomputeOption]:
    """Return a share of the options, at least one, spread evenly over the layers, the cheapest name first.

    The recomputation of these layers hides the copies of the layers in between.
    """
    by_name: dict[str, list[RecomputeOption]] = {}
    for option in options:
        by_name.setdefault(option.name, []).append(option)
    left, found = max(1, round(share * len(options))), []
    for same in sorted(by_name.values(), key=lambda same: median(option.ms_per_byte for option in same)):
        count = min(left, len(same))
        found += [same[len(same) * index // count] for index in range(count)]
        left -= count
    return found


def first_layers(options: Collection[RecomputeOption], share: float) -> list[RecomputeOption]:
    """Return a share of the options of each virtual stage, at least one, those of its first layers.

    The last layers have no time to leave before their backward, and what they would free comes back where the backward
    begins, which is mostly where the peak is. What the first layers free counts there.
    """
    by_stage: dict[int, list[RecomputeOption]] = {}
    for option in sorted(options, key=lambda option: min(slot.layer for slot in option.replaces)):
        by_stage.setdefault(min(slot.stage for slot in option.replaces), []).append(option)
    return [option for same in by_stage.values() for option in same[: max(1, round(share * len(same)))]]


def with_recomputation(shapes: Shapes, options: Collection[RecomputeOption]) -> Shapes:
    """Return the shapes of chunks that recompute what `options` say: fewer bytes, longer backwards.

    Bytes that a group still saves, such as the input of the recomputation, leave like any other.
    """
    if not options:
        return shapes
    return tuple(_recomputing(stage, shape, options) for stage, shape in enumerate(shapes))


def _recomputing(stage: int, shape: ChunkShape, options: Iterable[RecomputeOption]) -> ChunkShape:
    groups = list(shape.groups)
    slots = slots_of(stage, groups)
    for option in options:
        freed, milliseconds = option.freed_bytes, option.milliseconds
        replaced = [index for index in range(len(groups)) if slots[index] in option.replaces]
        for index in reversed(replaced):  # its backward begins with the last of them
            group: GroupShape = groups[index]
            taken = min(freed, group.nbytes)
            again = (taken if option.comes_back else 0) + (option.output_bytes if index == replaced[0] else 0)
            groups[index] = dataclasses.replace(
                group,
                nbytes=group.nbytes - taken,
                backward_ms=group.backward_ms + milliseconds,
                recomputed_bytes=again,
            )
            freed, milliseconds = freed - taken, 0.0
    return dataclasses.replace(shape, groups=tuple(groups))
