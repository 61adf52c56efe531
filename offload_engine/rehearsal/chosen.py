# SPDX-License-Identifier: Apache-2.0
"""Chooses what to keep, offload and recompute within a budget, from a rehearsal: as on a GPU, without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from offload_engine.errors import BudgetError
from offload_engine.planning.choices import Choices, slots_of
from offload_engine.planning.choose import Chosen, choose
from offload_engine.planning.memory import Job, MeasuredBoundary, MeasuredMemory, make_memory_model
from offload_engine.planning.moves import Boundary
from offload_engine.planning.predict import Costs, Prediction, summed
from offload_engine.planning.recompute import RecomputeOption
from offload_engine.planning.shapes import Shapes
from offload_engine.planning.steps import Decision, Steps
from offload_engine.rehearsal.engine import NotedBoundary
from offload_engine.rehearsal.forecast import CONTEXT_BYTES

_ANY: Final = 1 << 62


class RankChooser:
    """Chooses for one rank within any budget, from one rehearsal.

    Args:
        rehearsed: the rehearsed step, with everything offloaded.
        whole: the step to choose for, with all its microbatches.
        boundaries: boundaries of the rehearsal.
        costs: costs of moves and of recomputation.
        wasted_bytes: bytes that the allocator reserves in vain in the rehearsed step, and in all that move something.
        wasted_keeping: the same if nothing moves.
        context_bytes: bytes of the GPU outside torch's allocator.
    """

    def __init__(
        self,
        rehearsed: Job,
        whole: Job,
        boundaries: Sequence[NotedBoundary],
        costs: Costs,
        wasted_bytes: int,
        wasted_keeping: int,
        context_bytes: int = CONTEXT_BYTES,
    ) -> None:
        measured = MeasuredMemory(
            tuple(MeasuredBoundary(_boundary(noted), noted.peak_bytes, noted.resident_bytes) for noted in boundaries),
            between_bytes=0,
            overhead_bytes=wasted_bytes + context_bytes,
            wasted_bytes=wasted_bytes,
        )
        self._model = make_memory_model(rehearsed, measured, is_early_certain=False).hoping(wasted_bytes)
        self._whole = whole
        self._costs = costs
        self._steps = Steps(whole, costs.link, costs.options)
        slots = (slot for stage, shape in enumerate(whole.shapes) for slot in slots_of(stage, shape.groups))
        self._steps.wasted_bytes[Decision(Choices(frozenset(slots)))] = wasted_keeping

    def within(self, budget_bytes: int) -> Prediction | None:
        """Choose within what the process may hold on its GPU; None if nothing fits."""
        try:
            return self._chosen(budget_bytes).best
        except BudgetError:
            return None

    @property
    def ends(self) -> tuple[int, int]:
        """Return the lowest budget, and what the process holds if nothing moves."""
        chosen = self._chosen(_ANY)
        return chosen.floor.held_bytes, chosen.top.held_bytes

    def _chosen(self, budget_bytes: int) -> Chosen:
        return choose(self._whole, self._model, budget_bytes, self._costs, steps=self._steps)


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
