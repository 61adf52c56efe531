# SPDX-License-Identifier: Apache-2.0
"""Chooses what to keep, offload and recompute within a budget, from a rehearsal: as on a GPU, without one."""

from __future__ import annotations

from collections.abc import Sequence

from offload_engine.errors import BudgetError
from offload_engine.planning.choices import Choices, slots_of
from offload_engine.planning.choose import choose
from offload_engine.planning.memory import Job, MeasuredBoundary, MeasuredMemory, make_memory_model
from offload_engine.planning.moves import Boundary
from offload_engine.planning.predict import Costs, Prediction, summed
from offload_engine.planning.recompute import RecomputeOption
from offload_engine.planning.shapes import Shapes
from offload_engine.planning.steps import Decision, Steps
from offload_engine.rehearsal.engine import NotedBoundary
from offload_engine.rehearsal.forecast import CONTEXT_BYTES


def choose_within(
    budget_bytes: int,
    rehearsed: Job,
    whole: Job,
    boundaries: Sequence[NotedBoundary],
    costs: Costs,
    wasted_bytes: int,
    wasted_keeping: int,
    context_bytes: int = CONTEXT_BYTES,
) -> Prediction | None:
    """Choose for one rank; None if nothing fits.

    Args:
        budget_bytes: bytes that the process may hold on its GPU.
        rehearsed: the rehearsed step, with everything offloaded.
        whole: the step to choose for, with all its microbatches.
        boundaries: boundaries of the rehearsal.
        costs: costs of moves and of recomputation.
        wasted_bytes: bytes that the allocator reserves in vain in the rehearsed step, and in all that move something.
        wasted_keeping: the same if nothing moves.
        context_bytes: bytes of the GPU outside torch's allocator.
    """
    measured = MeasuredMemory(
        tuple(MeasuredBoundary(_boundary(noted), noted.peak_bytes, noted.resident_bytes) for noted in boundaries),
        between_bytes=0,
        overhead_bytes=wasted_bytes + context_bytes,
        wasted_bytes=wasted_bytes,
    )
    model = make_memory_model(rehearsed, measured, is_early_certain=False)
    steps = Steps(whole, costs.link, costs.options)
    slots = (slot for stage, shape in enumerate(whole.shapes) for slot in slots_of(stage, shape.groups))
    steps.wasted_bytes[Decision(Choices(frozenset(slots)))] = wasted_keeping
    try:
        return choose(whole, model.hoping(wasted_bytes), budget_bytes, costs, steps=steps).best
    except BudgetError:
        return None


def layer_options(saved: Shapes, checkpointed: Shapes) -> tuple[RecomputeOption, ...]:
    """Return what checkpointing each layer would free and cost.

    Args:
        saved: shapes of a step in which each layer has groups of its name.
        checkpointed: shapes of a step in which these hold only inputs.
    """
    inputs = summed((group.name, group.nbytes) for shape in checkpointed for group in shape.groups)
    found = []
    for stage, shape in enumerate(saved):
        slots = list(zip(slots_of(stage, shape.groups), shape.groups, strict=True))
        for name in dict.fromkeys(group.name for group in shape.groups):
            own = [(slot, group) for slot, group in slots if group.name == name]
            freed = sum(group.nbytes for _, group in own) - inputs.get(name, 0)
            if freed > 0:
                replaces = frozenset(slot for slot, _ in own)
                found.append(RecomputeOption("layer", replaces, freed, sum(group.forward_ms for _, group in own)))
    return tuple(found)


def _boundary(noted: NotedBoundary) -> Boundary:
    return Boundary(noted.kind, noted.chunk, -1 if noted.group is None else noted.group.number)
