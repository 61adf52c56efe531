"""What becomes of each group of a chunk: it is kept, offloaded or recomputed, the same for every microbatch.

A group is named by its slot, not by its index, which shifts when a group before it is recomputed. As text, a line for
each slot:

    0 3 core_attn 0  keep          virtual stage, layer, name, and number among those of the same name in that layer
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class Choice(enum.Enum):
    """What becomes of a group."""

    KEEP = "keep"
    """It stays on the device."""
    OFFLOAD = "offload"
    """It may be copied out; the policy says when."""
    RECOMPUTE = "recompute"
    """It is not saved: the backward computes it again."""


class Slot(NamedTuple):
    """The place of a group in its chunk, whatever the microbatch."""

    stage: int
    """Virtual stage of the rank."""
    layer: int
    """Of the chunk; -1 where layers are not known."""
    name: str
    part: int
    """Number among the groups of this name in this layer, from 0."""

    def __str__(self) -> str:
        return f"{self.stage} {self.layer} {self.name} {self.part}"


@dataclass(frozen=True)
class Choices:
    """The choice for each slot of one rank. Hashable, so that plans can be memoised by it.

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
        """Return the choice for a slot; those that no choice names are offloaded."""
        if slot in self.kept:
            return Choice.KEEP
        return Choice.RECOMPUTE if slot in self.recomputed else Choice.OFFLOAD


@dataclass(frozen=True)
class Allowance:
    """What a step may have on the device: set between two steps."""

    choices: Choices = Choices()
    kept_bytes: Mapping[Slot, int] = field(default_factory=dict)
    """Of each group that is kept; with more it leaves, as its policy says."""
    resident_bytes: int = 0
    """With more than this on the device when it commits, a group leaves that would be kept."""
    room_bytes: int | None = None
    """Of groups on the device, by which all others stay as long as there is room; None: they leave."""
    saved_bytes: int | None = None
    """Of groups, wherever they are, when the first backward of a step begins; None: to be learned."""


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


def format_choices(choices: Mapping[Slot, Choice]) -> str:
    """Format the choice of each slot as text, a line for each."""
    return "".join(f"{slot}  {choice.value}\n" for slot, choice in sorted(choices.items(), key=_by_slot))


def parse_choices(text: str) -> dict[Slot, Choice]:
    """Parse the text of choices; the inverse of `format_choices`. Empty lines and `# comments` are left out.

    Raises:
        ValueError: naming the first line that is none, or that names a slot again.
    """
    found: dict[Slot, Choice] = {}
    for number, row in enumerate(text.splitlines(), 1):
        words = row.partition("#")[0].split()
        if not words:
            continue
        try:
            slot, choice = _parse_line(words)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        if slot in found:
            raise ValueError(f"line {number}: {slot} has a line already")
        found[slot] = choice
    return found


def all_choices(slots: Iterable[Slot], choices: Choices) -> dict[Slot, Choice]:
    """Return the choice of each of `slots`."""
    return {slot: choices.of(slot) for slot in slots}


def choices_for(slots: Sequence[Slot], chosen: Mapping[Slot, Choice], source: str) -> Choices:
    """Return choices that were made before for the same slots.

    Args:
        slots: of this model.
        chosen: the choice of each slot, as `parse_choices` returns it.
        source: where they come from, for the error.

    Raises:
        ValueError: if the slots are those of another model, or of another layout of it.
    """
    here, there = set(slots), set(chosen)
    differing = sorted(here - there) or sorted(there - here)
    if differing:
        where = "has no" if differing[0] in here else "names a"
        raise ValueError(
            f"{source} is of another model or layout: it {where} group {differing[0]} (stage, layer, name, part); it "
            f"has {len(there)} groups, this rank {len(here)}. Remove it, and the next steps make a plan of this model"
        )
    return Choices(
        frozenset(slot for slot in slots if chosen[slot] is Choice.KEEP),
        frozenset(slot for slot in slots if chosen[slot] is Choice.RECOMPUTE),
    )


def _parse_line(words: Sequence[str]) -> tuple[Slot, Choice]:
    if len(words) < 5:
        raise ValueError("expected stage, layer, name, part and choice, as in '0 3 core_attn 0 keep'")
    stage, layer, *name, part, choice = words
    return Slot(int(stage), int(layer), " ".join(name), int(part)), Choice(choice)


def _by_slot(item: tuple[Slot, Choice]) -> Slot:
    return item[0]
