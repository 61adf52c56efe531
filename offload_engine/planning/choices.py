# SPDX-License-Identifier: Apache-2.0
"""Defines the choice for each group of a chunk: keep, offload or recompute, the same for every microbatch.

A group is named by its slot, not by its index, which shifts when an earlier group is recomputed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from offload_engine.schedule import Action


class Choice(enum.Enum):
    """How a group is treated."""

    KEEP = "keep"
    """It stays on the device."""
    OFFLOAD = "offload"
    """It may be copied out; the policy says when."""
    RECOMPUTE = "recompute"
    """It is not saved: the backward recomputes it."""


class Slot(NamedTuple):
    """The place of a group in its chunk, whatever the microbatch."""

    stage: int
    """Virtual stage of the rank."""
    layer: int
    """Number of the layer in its chunk; -1 if layers are not known."""
    name: str
    part: int
    """Position among the groups of this name in this layer, from 0."""

    def __str__(self) -> str:
        layer = "" if self.layer < 0 else f"layer {self.layer}, "
        return f"stage {self.stage}, {layer}{self.name}, part {self.part}"


@dataclass(frozen=True)
class Choices:
    """Holds the choice for each slot of one rank. Hashable, so that plans can be memoised by it.

    Raises:
        ValueError: if a slot is kept and recomputed.
    """

    kept: frozenset[Slot] = frozenset()
    recomputed: frozenset[Slot] = frozenset()

    def __post_init__(self) -> None:
        if both := sorted(self.kept & self.recomputed):
            raise ValueError(f"{both[0]} is kept and recomputed: choose one")

    def __bool__(self) -> bool:
        return bool(self.kept or self.recomputed)

    def of(self, slot: Slot) -> Choice:
        """Return the choice for a slot; by default, offload."""
        if slot in self.kept:
            return Choice.KEEP
        return Choice.RECOMPUTE if slot in self.recomputed else Choice.OFFLOAD


@dataclass(frozen=True)
class Allowance:
    """Limits what a step may have on the device. Set between two steps."""

    choices: Choices = Choices()
    kept_bytes: Mapping[Slot, int] = field(default_factory=dict)
    """How many bytes each kept group may save; a group that saves more leaves, as its policy says."""
    resident_bytes: int = 0
    """A group that is chosen to be kept still leaves if more than this is on the device when it commits."""
    room_bytes: int | None = None
    """Bound on the bytes of groups on the device: the other groups stay while they fit. None: they leave."""
    saved_bytes: int | None = None
    """Bytes that groups have saved, on device or host, when a step's first backward begins; None: not known yet."""
    arena_bytes: int | None = None
    """Of the arena that the allocator reserves before the step; see `replayed`. None: as before."""
    slots: frozenset[Slot] = frozenset()
    """Every slot for which a choice was made; empty: not known."""
    actions: tuple[Action, ...] = field(default=(), compare=False)
    """Of the steps that it is for; empty: not known. Steps whose schedule is not told are taken for such."""


class Named(Protocol):
    """A group of a chunk."""

    @property
    def name(self) -> str: ...

    @property
    def layer(self) -> int: ...


def slots_of(stage: int, groups: Iterable[Named]) -> list[Slot]:
    """Return the slot of each group of a chunk, in order."""
    counts: dict[tuple[int, str], int] = {}
    slots = []
    for group in groups:
        part = counts.get((group.layer, group.name), 0)
        counts[group.layer, group.name] = part + 1
        slots.append(Slot(stage, group.layer, group.name, part))
    return slots
