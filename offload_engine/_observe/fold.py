# SPDX-License-Identifier: Apache-2.0
"""Sums up recorded steps for tables: by stage and module, folded over layers and ranks that are alike."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from offload_engine._observe.reasons import STAYED_ON_PURPOSE, Reason
from offload_engine._observe.record import SavedRecord, StepRecord
from offload_engine.planning.moves import OUT

_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
_WRAPPER: Final = re.compile(r"^((module|_orig_mod)(\.|$))+")
Fates = tuple[tuple[bool, ...], frozenset[Reason]]


class Place(NamedTuple):
    """Where something was saved."""

    rank: int
    stage: int
    module: str
    """Name of the group, or path of the module; with `*` for numbers."""
    layer: int
    """-1 where it is not known."""


@dataclass
class ModuleSums:
    """What one module saved in a step, in bytes of storages, each counted once."""

    num_groups: int = 0
    moved_bytes: int = 0
    kept_bytes: int = 0
    """Bytes of storages that stayed on purpose."""
    small_bytes: int = 0
    stayed_bytes: dict[Reason, int] = field(default_factory=dict)
    """Bytes of storages that stayed for other reasons, by reason."""
    wait_ms: float = 0.0
    """How long compute waited for its copies."""

    @property
    def fates(self) -> Fates:
        """Return the fates of the bytes, without amounts, which differ between layers of experts."""
        whats = (self.num_groups > 0, self.moved_bytes > 0, self.kept_bytes > 0, self.small_bytes > 0)
        return whats, frozenset(self.stayed_bytes)

    def add(self, other: ModuleSums) -> None:
        """Add the sums of another layer, rank or step."""
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


@dataclass
class ModuleRow:
    """Sums over all layers and ranks that are alike; without groups, over all stages as well."""

    ranks: set[int]
    stages: set[int]
    module: str
    layers: set[int]
    sums: ModuleSums

    def add(self, other: ModuleRow) -> None:
        """Add other layers or ranks."""
        self.ranks |= other.ranks
        self.stages |= other.stages
        self.layers |= other.layers
        self.sums.add(other.sums)


class LinkUse(NamedTuple):
    """What one rank copied in one direction."""

    nbytes: int
    busy_ms: float

    @property
    def gbps(self) -> float:
        """Return the bandwidth while it copied, in GB/s; 0 where nothing was copied."""
        return self.nbytes / self.busy_ms / 1e6 if self.busy_ms > 0 else 0.0


class RankSums(NamedTuple):
    """One recorded step of one rank, as small as its tables: what ranks send to each other."""

    rank: int
    step: int
    duration_ms: float
    copied_out: LinkUse
    copied_in: LinkUse
    waited_ms: float
    num_late: int
    """Storages that were still on the host when their backward began."""
    rows: tuple[ModuleRow, ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """Return the stages that this rank has."""
        return _sorted(stage for row in self.rows for stage in row.stages)


def sums_of(record: StepRecord) -> RankSums:
    """Sum up a record."""
    out, back = link_use(record)
    waited_ms = sum(wait.exposed_ms for wait in record.waits)
    num_late = record.counts.get("prefetch_misses", 0)
    rows = (
        ModuleRow({record.rank}, {place.stage}, place.module, {place.layer}, sums)
        for place, sums in _sums_by_place(record).items()
    )
    return RankSums(record.rank, record.step, record.duration_ms, out, back, waited_ms, num_late, tuple(fold(rows)))


def fold(rows: Iterable[ModuleRow]) -> list[ModuleRow]:
    """Add up the rows of each module whose fates are alike, without changing the given rows.

    Rows with groups come first, stage by stage; the others cover all stages.
    """
    folded: dict[tuple[frozenset[int], str, Fates], ModuleRow] = {}
    for row in rows:
        stages = frozenset(row.stages) if row.sums.num_groups else frozenset[int]()
        key = stages, row.module, row.sums.fates
        folded.setdefault(key, ModuleRow(set(), set(), row.module, set(), ModuleSums())).add(row)
    return sorted(folded.values(), key=_place_in_table)


def _place_in_table(row: ModuleRow) -> tuple[Any, ...]:
    sums = row.sums
    order = (0, min(row.stages), -sums.moved_bytes) if sums.num_groups else (1, -sum(sums.stayed_bytes.values()))
    return *order, row.module, min(row.layers), min(row.ranks)


def _sums_by_place(record: StepRecord) -> dict[Place, ModuleSums]:
    found: dict[Place, ModuleSums] = defaultdict(ModuleSums)
    places = group_places(record)
    for group in record.groups:
        found[places[group.group]].num_groups += 1
    counted: set[int] = set()
    for saved in record.saved:
        if saved.reason is Reason.WEIGHT:  # saving it takes no memory
            continue
        if saved.storage < 0 or saved.storage not in counted:
            counted.add(saved.storage)
            found[place_of(record, saved, places)].count(saved)
    for wait in record.waits:
        if wait.group in places:
            found[places[wait.group]].wait_ms += wait.exposed_ms
    return found


def group_places(record: StepRecord) -> dict[str, Place]:
    """Return the place of each group of a record."""
    places = {}
    for group in record.groups:
        name, number = _without_numbers(group.name)
        layer = group.layer if group.layer >= 0 else number
        places[group.group] = Place(record.rank, record.stage_of(group.group), name, layer)
    return places


def place_of(record: StepRecord, saved: SavedRecord, places: dict[str, Place]) -> Place:
    """Return where a tensor was saved: in its group, or in the module that ran."""
    place = places.get(saved.group)
    if place is not None:
        return place
    module, layer = _module_of(saved)
    return Place(record.rank, record.stage_of(saved.group), module or "(no module)", layer)


def _module_of(saved: SavedRecord) -> tuple[str, int]:
    """Return the path of the module that saved a tensor, with `*` for numbers, and the first number, or -1."""
    module, number = _without_numbers(_WRAPPER.sub("", saved.module))
    return module or ("(model)" if saved.module else ""), number


def _without_numbers(path: str) -> tuple[str, int]:
    """Return a path with `*` for numbers, and the first number, or -1: `layers.*` and 3 for `layers.3`."""
    number = _NUMBER.search(path)
    return _NUMBER.sub("*", path), int(number.group()) if number else -1


def link_use(record: StepRecord) -> tuple[LinkUse, LinkUse]:
    """Return what was copied out and in; copies of one stream follow each other, so their times add up."""
    sums = [[0, 0.0], [0, 0.0]]
    for copy in record.copies:
        direction = sums[0 if copy.op is OUT else 1]
        direction[0] += copy.nbytes
        direction[1] += copy.end_ms - copy.begin_ms
    return LinkUse(int(sums[0][0]), sums[0][1]), LinkUse(int(sums[1][0]), sums[1][1])


def numbers_text(numbers: Iterable[int]) -> str:
    """Return `0-2, 5` for 0, 1, 2 and 5; omit negative numbers."""
    runs: list[list[int]] = []
    for number in sorted({n for n in numbers if n >= 0}):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


class WhyRow(NamedTuple):
    """Tensors that are alike, and their fate."""

    ranks: tuple[int, ...]
    stage: int
    group: str
    """Name of the group; empty where none was open."""
    module: str
    """Path of the module that saved the tensors; empty if unknown."""
    layers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    num_tensors: int
    nbytes: int
    reason: Reason


def why_rows(records: Sequence[StepRecord], pattern: str = "") -> list[WhyRow]:
    """Fold the saved tensors that match, ordered by bytes, largest first.

    Args:
        records: of any number of ranks.
        pattern: a regular expression, searched in the module, the group, the shape, the dtype and the reason.
    """
    asked = re.compile(pattern, re.IGNORECASE)
    found: dict[tuple[Any, ...], list[tuple[int, int, int]]] = defaultdict(list)
    for record in records:
        places = group_places(record)
        for saved in record.saved:
            place = place_of(record, saved, places)
            shape = "x".join(map(str, saved.shape))
            name, (module, number) = place.module if saved.group in places else "", _module_of(saved)
            names = f"{place.module} {saved.name} {saved.module} {saved.group}"
            text = f"{names} {shape} {saved.dtype} {saved.reason.value}"
            if asked.search(text):
                key = (place.stage, name, module, saved.shape, saved.dtype, saved.reason)
                found[key].append((place.rank, place.layer if place.layer >= 0 else number, saved.nbytes))
    rows = [
        WhyRow(_sorted(r for r, _, _ in of), stage, group, module, _sorted(n for _, n, _ in of), shape, dtype, len(of),
               sum(nbytes for _, _, nbytes in of), reason)
        for (stage, group, module, shape, dtype, reason), of in found.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: (-row.nbytes, row.group, row.module, row.shape))


def _sorted(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(numbers)))
