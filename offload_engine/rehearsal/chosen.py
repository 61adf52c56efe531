"""What to keep, offload and recompute within a budget, by what a rehearsal has shown: as on a GPU, without one."""

from __future__ import annotations

from collections.abc import Sequence

from offload_engine.errors import BudgetError
from offload_engine.planning.choose import choose
from offload_engine.planning.clocks import Link
from offload_engine.planning.memory import Job, MeasuredBoundary, MeasuredMemory, make_memory_model
from offload_engine.planning.moves import Boundary
from offload_engine.planning.predict import Costs, Prediction
from offload_engine.rehearsal.engine import NotedBoundary
from offload_engine.rehearsal.forecast import CONTEXT_BYTES, RESERVED_SHARE


def choose_within(
    budget_bytes: int, rehearsed: Job, whole: Job, boundaries: Sequence[NotedBoundary], link: Link
) -> Prediction | None:
    """Choose for one rank; None: it does not fit.

    Args:
        budget_bytes: of the process on its GPU.
        rehearsed: the step that was rehearsed, with everything offloaded.
        whole: the step to choose for, with all its microbatches.
        boundaries: of the rehearsal.
        link: of the GPU.
    """
    peak_bytes = max((noted.peak_bytes for noted in boundaries), default=0)
    measured = MeasuredMemory(
        tuple(MeasuredBoundary(_boundary(noted), noted.peak_bytes, noted.resident_bytes) for noted in boundaries),
        between_bytes=0,
        overhead_bytes=int(peak_bytes * (RESERVED_SHARE - 1)) + CONTEXT_BYTES,
    )
    model = make_memory_model(rehearsed, measured, is_early_certain=False)
    try:
        return choose(whole, model, budget_bytes, Costs(link)).best
    except BudgetError:
        return None


def _boundary(noted: NotedBoundary) -> Boundary:
    return Boundary(noted.kind, noted.chunk, -1 if noted.group is None else noted.group.number)
