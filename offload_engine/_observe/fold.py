"""Sums of recorded steps for tables: by stage and module, folded over the layers and ranks that are alike."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from offload_engine._observe.reasons import STAYED_ON_PURPOSE, Reason
from offload_engine._observe.record import SavedRecord, StepRecord
from offload_engine.planning.moves import OUT

_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
_WRAPPER: Final = re.compile(r"^(module\.|_orig_mod\.)+")


class Place(NamedTuple):
    """Where something was saved."""

    rank: int
    stage: int
    module: str
    """Name of the group, or path of the module with `*` for numbers."""
    layer: int
    """-1 where it is not known."""


@dataclass
class ModuleSums:
    """What one module saved in a step, in bytes of storages, each counted once."""

    num_groups: int = 0
    moved_bytes: int = 0
    kept_bytes: int = 0
    """Of what stayed on purpose."""
    small_bytes: int = 0
    stayed_bytes: dict[Reason, int] = field(default_factory=dict)
    """Of what stayed for other reasons."""
    wait_ms: float = 0.0
    """How long compute waited for its copies."""

    def is_like(self, other: ModuleSums) -> bool:
        """Return whether both are equal except for waits, which differ from layer to layer."""
        return all(getattr(self, name) == getattr(other, name) for name in _COMPARED)

    def add(self, other: ModuleSums) -> None:
        """Add what another layer, rank or step has."""
        self.num_groups += other.num_groups
        self.moved_bytes += other.moved_bytes
        self.kept_bytes += other.kept_bytes
        self.small_bytes += other.small_bytes
        self.wait_ms += other.wait_ms
        for reason, nbytes in other.stayed_bytes.items():
            self.stayed_bytes[reason] = self.stayed_bytes.get(reason, 0) + nbytes

    def count(self, saved: SavedRecord) -> None:
        """Count one storage."""
        if saved.reason is Reason.MOVED:
            self.moved_bytes += saved.nbytes
        elif saved.reason in STAYED_ON_PURPOSE:
            self.kept_bytes += saved.nbytes
        elif saved.reason is Reason.TOO_SMALL:
            self.small_bytes += saved.nbytes
        else:
            self.stayed_bytes[saved.reason] = self.stayed_bytes.get(saved.reason, 0) + saved.nbytes


_COMPARED: Final = ("num_groups", "moved_bytes", "kept_bytes", "small_bytes", "stayed_bytes")


@dataclass
class ModuleRow:
    """Sums of all layers and ranks that are alike."""

    ranks: set[int]
    stage: int
    module: str
    layers: set[int]
    one: ModuleSums
    """Of each layer of each rank."""
    sums: ModuleSums
    """Of all of them."""


class LinkUse(NamedTuple):
    """What one rank copied in one direction."""

    nbytes: int
    busy_ms: float

    @property
    def gbps(self) -> float:
        """Return the bandwidth while it copied, in GB/s; 0 where nothing was copied."""
        return self.nbytes / self.busy_ms / 1e6 if self.busy_ms > 0 else 0.0


def module_rows(records: Iterable[StepRecord]) -> list[ModuleRow]:
    """Sum by stage and module, and fold what is alike."""
    rows: list[ModuleRow] = []
    for place, sums in sorted(_sums(records).items(), key=lambda item: item[0]):
        for row in rows:
            if (row.stage, row.module) == (place.stage, place.module) and row.one.is_like(sums):
                row.ranks.add(place.rank)
                row.layers.add(place.layer)
                row.sums.add(sums)
                break
        else:
            total = ModuleSums()
            total.add(sums)
            rows.append(ModuleRow({place.rank}, place.stage, place.module, {place.layer}, sums, total))
    return sorted(rows, key=lambda row: (row.stage, -row.sums.moved_bytes, row.module, min(row.layers)))


def _sums(records: Iterable[StepRecord]) -> dict[Place, ModuleSums]:
    found: dict[Place, ModuleSums] = defaultdict(ModuleSums)
    for record in records:
        places = group_places(record)
        for group in record.groups:
            found[places[group.group]].num_groups += 1
        counted: set[int] = set()
        for saved in record.saved:
            if saved.storage < 0 or saved.storage not in counted:
                counted.add(saved.storage)
                found[place_of(record, saved, places)].count(saved)
        for wait in record.waits:
            if wait.group in places:
                found[places[wait.group]].wait_ms += wait.exposed_ms
    return found


def group_places(record: StepRecord) -> dict[str, Place]:
    """Return where each group of a record is."""
    return {g.group: Place(record.rank, stage_of(g.group), g.name, g.layer) for g in record.groups}


def place_of(record: StepRecord, saved: SavedRecord, places: dict[str, Place]) -> Place:
    """Return where a tensor was saved: in its group, or in the module that ran."""
    place = places.get(saved.group)
    if place is not None:
        return place
    path = _WRAPPER.sub("", saved.module)
    number = _NUMBER.search(path)
    module = _NUMBER.sub("*", path) or "(no module)"
    return Place(record.rank, stage_of(saved.group), module, int(number.group()) if number else -1)


def link_use(record: StepRecord) -> tuple[LinkUse, LinkUse]:
    """Return what was copied out and in; copies of one stream follow each other, so their times add up."""
    sums = [[0, 0.0], [0, 0.0]]
    for copy in record.copies:
        direction = sums[0 if copy.op is OUT else 1]
        direction[0] += copy.nbytes
        direction[1] += copy.end_ms - copy.begin_ms
    return LinkUse(int(sums[0][0]), sums[0][1]), LinkUse(int(sums[1][0]), sums[1][1])


def stage_of(group: str) -> int:
    """Return the stage of a group, `0.3:5`, or of a chunk, `0.3`."""
    return int(group.partition(".")[0])


def numbers_text(numbers: Iterable[int]) -> str:
    """Return `0-2, 5` for 0, 1, 2 and 5; negative ones are left out."""
    runs: list[list[int]] = []
    for number in sorted(n for n in numbers if n >= 0):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


class WhyRow(NamedTuple):
    """Tensors that are alike, and what became of them."""

    ranks: tuple[int, ...]
    stage: int
    module: str
    layers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    num_tensors: int
    nbytes: int
    reason: Reason


def why_rows(records: Sequence[StepRecord], pattern: str = "") -> list[WhyRow]:
    """Fold the saved tensors that match, the most bytes first.

    Args:
        records: of any number of ranks.
        pattern: a regular expression, looked for in the module, the group, the shape, the dtype and the reason.
    """
    asked = re.compile(pattern, re.IGNORECASE)
    found: dict[tuple[int, str, tuple[int, ...], str, Reason], list[tuple[int, int, int]]] = defaultdict(list)
    for record in records:
        places = group_places(record)
        for saved in record.saved:
            place = place_of(record, saved, places)
            shape = "x".join(map(str, saved.shape))
            text = f"{place.module} {saved.module} {saved.group} {shape} {saved.dtype} {saved.reason.value}"
            if asked.search(text):
                key = (place.stage, place.module, saved.shape, saved.dtype, saved.reason)
                found[key].append((place.rank, place.layer, saved.nbytes))
    rows = [
        WhyRow(_sorted(r for r, _, _ in of), stage, module, _sorted(n for _, n, _ in of), shape, dtype, len(of),
               sum(nbytes for _, _, nbytes in of), reason)
        for (stage, module, shape, dtype, reason), of in found.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: (-row.nbytes, row.module, row.shape))


def _sorted(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(numbers)))
