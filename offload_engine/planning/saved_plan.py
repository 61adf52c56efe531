# SPDX-License-Identifier: Apache-2.0
"""Keeps a decision in a file, so that a job that is resumed starts with it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from offload_engine.counted import counted
from offload_engine.planning.choices import Allowance, Choice, Choices, Slot

_VERSION: Final = 3
_NUMBERS: Final = ("resident_bytes", "room_bytes", "saved_bytes", "arena_bytes")


class PlanFigures(NamedTuple):
    """What is predicted of a step with a decision, beside the most bytes that the process holds.

    Bytes of groups are sums over a step.
    """

    step_ms: float
    allocated_bytes: int
    """Of the bytes that the process holds, allocated by tensors."""
    kept_bytes: int
    offloaded_bytes: int
    recomputed_bytes: int
    exposed_ms: float
    """How long compute waits for copies."""
    lowest_bytes: int
    """The lowest possible budget."""
    lowest_step_ms: float


@dataclass(frozen=True)
class SavedPlan:
    """What may be on the device in each step, and what that takes."""

    allowance: Allowance
    held_bytes: int
    """The most bytes that the process holds."""
    figures: PlanFigures
    model: Mapping[str, object] = field(default_factory=dict)
    """What the plan is for, such as sizes of the model and its layout: plain values by name. Empty: not known."""


def format_saved(saved: SavedPlan) -> str:
    """Format a decision as JSON, with a line for each slot."""
    allowance = saved.allowance
    head: dict[str, object] = {"version": _VERSION, "held_bytes": saved.held_bytes}
    head |= {name: getattr(allowance, name) for name in _NUMBERS}
    slots = ",\n".join(f"    {json.dumps(_row(slot, allowance))}" for slot in sorted(allowance.slots))
    head |= {"figures": saved.figures._asdict(), "model": dict(saved.model)}
    numbers = ",\n".join(f'  "{name}": {json.dumps(value)}' for name, value in head.items())
    return f'{{\n{numbers},\n  "slots": [\n{slots}\n  ]\n}}\n'


def parse_saved(text: str, source: str) -> SavedPlan:
    """Parse a decision; the exact inverse of `format_saved`.

    Raises:
        ValueError: if the text is not a decision; names `source`.
    """
    try:
        data = json.loads(text)
        if data["version"] != _VERSION:
            raise ValueError(f"version {data['version']!r}, expected {_VERSION}")
        rows = [
            (Slot(stage, layer, name, part), Choice(choice), kept)
            for stage, layer, name, part, choice, kept in data["slots"]
        ]
        _check_numbers(
            [data["held_bytes"], *(number for slot, *_ in rows for number in (slot.stage, slot.layer, slot.part))]
        )
        _check_numbers([kept for *_, kept in rows if kept is not None])
        figures, model = _figures(data["figures"]), dict(data["model"])
        return SavedPlan(_allowance(rows, {name: data[name] for name in _NUMBERS}), data["held_bytes"], figures, model)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{source} is not a plan of this version ({type(error).__name__}: {error}): remove it, and a new one is "
            "made"
        ) from None


def _check_numbers(values: Iterable[object]) -> None:
    for value in values:
        if type(value) is not int:
            raise TypeError(f"{value!r} where a whole number is expected")


def _figures(data: dict[str, Any]) -> PlanFigures:
    found = PlanFigures(**data)
    for name, value in found._asdict().items():
        kinds = (int, float) if name.endswith("_ms") else (int,)
        if type(value) not in kinds:
            raise TypeError(f"{name} {value!r} where a number is expected")
    return found


def check_described(saved: SavedPlan, model: Mapping[str, object], source: str) -> None:
    """Check that a plan is for a model of this description, as far as both are known.

    Raises:
        ValueError: if it is not; names `source` and the first value that differs.
    """
    for name, value in saved.model.items():
        if name in model and value != model[name]:
            raise ValueError(
                f"{source} is of another model or layout: of {name} {value}, and this one has "
                f"{model[name]}. Remove it, and a new one is made"
            )


def check_same_model(saved: SavedPlan, slots: Collection[Slot], source: str) -> None:
    """Check that a plan is for a model with these groups.

    Raises:
        ValueError: if it is not; names `source` and the first group that differs.
    """
    allowance, here = saved.allowance, frozenset(slots)
    missing = allowance.slots - allowance.choices.recomputed - here  # recomputed slots need not be groups
    unknown = here - allowance.slots
    if not missing and not unknown:
        return
    what = f"names a group that is not here ({min(missing)})" if missing else f"does not name a group ({min(unknown)})"
    raise ValueError(
        f"{source} is of another model or layout: it {what}, and has {counted(len(allowance.slots), 'group')}, this "
        f"rank {len(here)}. Remove it, and a new one is made"
    )


def _row(slot: Slot, allowance: Allowance) -> list[Any]:
    return [*slot, allowance.choices.of(slot).value, allowance.kept_bytes.get(slot)]


def _allowance(rows: list[tuple[Slot, Choice, int | None]], numbers: dict[str, int | None]) -> Allowance:
    choices = Choices(
        frozenset(slot for slot, choice, _ in rows if choice is Choice.KEEP),
        frozenset(slot for slot, choice, _ in rows if choice is Choice.RECOMPUTE),
    )
    kept = {slot: nbytes for slot, _, nbytes in rows if nbytes is not None}
    resident, room, saved, arena = (numbers[name] for name in _NUMBERS)
    return Allowance(choices, kept, int(resident or 0), room, saved, arena, frozenset(slot for slot, _, _ in rows))
