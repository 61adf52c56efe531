# SPDX-License-Identifier: Apache-2.0
"""Derives from a decision what may be on the device."""

from __future__ import annotations

from typing import Final

from offload_engine.planning.choices import Allowance, slots_of
from offload_engine.planning.choose import Chosen
from offload_engine.planning.shapes import Shapes
from offload_engine.schedule import Action

TOLERANCE: Final = 9 / 8
"""A group may grow by this factor, because routing changes how many tokens experts get."""


def allowance_of(chosen: Chosen, shapes: Shapes, actions: tuple[Action, ...]) -> Allowance:
    """Return what may be on the device by a decision.

    Args:
        chosen: the decision.
        shapes: of the chunks, as measured.
        actions: of the steps.
    """
    best = chosen.best
    choices, room = best.decision
    sizes = {
        slot: round(TOLERANCE * group.nbytes)
        for stage, shape in enumerate(shapes)
        for slot, group in zip(slots_of(stage, shape.groups), shape.groups, strict=True)
    }
    kept = {slot: nbytes for slot, nbytes in sizes.items() if slot in choices.kept}
    saved = None if room is None else chosen.top.resident_bytes
    most = round(TOLERANCE * best.resident_bytes)
    return Allowance(choices, kept, most, room, saved, best.arena_bytes, frozenset(sizes), actions)
