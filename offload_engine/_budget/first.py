# SPDX-License-Identifier: Apache-2.0
"""Makes the first decision, together with all ranks that wait for each other in a step."""

from __future__ import annotations

from typing import Final

from offload_engine._budget.agreement import Agree
from offload_engine._budget.decide import Decider, timed
from offload_engine.errors import BudgetError
from offload_engine.planning.choices import Allowance

_NS: Final = 1e6
"""Of a millisecond."""


def decide_first(decider: Decider) -> Allowance:
    """Decide about steps as the measured one.

    Raises:
        BudgetError: on every rank, if the budget of one is below its floor, and it has not decided before.
    """
    meet = decider.meet
    try:
        allowance = decider.decide()
    except BudgetError:
        meet((1, 0, 0))
        raise
    has_failed, longest, floor_ns = meet((0, *_size_of_step(decider)))
    if has_failed:
        decider.chosen = None
        raise BudgetError("gpu_budget is below what a step takes on another rank, which says by how much")
    if decider.stages.is_pipeline and meet is decider.agree_all:
        _meet_stages(decider, meet, longest, floor_ns / _NS)
    return allowance


def _size_of_step(decider: Decider) -> tuple[int, int]:
    """Return the number of actions of the measured step, and its time in ns."""
    assert decider.known is not None
    return len(decider.known.job.actions), round(_NS * (decider.known.costs.floor_ms or 0.0))


def _meet_stages(decider: Decider, meet: Agree, longest: int, floor_ms: float) -> None:
    """Tell the other stages of the pipeline what this one does: all of them wait for the slowest."""
    known, chosen = decider.known, decider.chosen
    assert known is not None and chosen is not None
    decided = known.work(chosen.best.decision, chosen.best.busy)
    assert known.took_ms is not None and decided is not None
    decider.stages.meet(meet, known.took_ms, decided, longest, floor_ms)
    decider.chosen = timed(decider, chosen)
