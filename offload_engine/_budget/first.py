# SPDX-License-Identifier: Apache-2.0
"""Makes the first decision, together with all ranks that wait for each other in a step."""

from __future__ import annotations

from typing import Final

from offload_engine._budget.decide import Decider
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
    has_failed, measured_ns, decided_ns = meet((0, *_work_ns(decider)))
    if has_failed:
        decider.chosen = None
        raise BudgetError("gpu_budget is below what a step takes on another rank, which says by how much")
    if measured_ns:
        _follow_slowest(decider, decided_ns / measured_ns)
    return allowance


def _work_ns(decider: Decider) -> tuple[int, int]:
    """Return how long this rank is at work in the measured step, and in one as decided; 0 in no pipeline."""
    assert decider.known is not None and decider.chosen is not None
    measured_ms, decided_ms = decider.known.work_ms(decider.chosen) or (0.0, 0.0)
    return round(_NS * measured_ms), round(_NS * decided_ms)


def _follow_slowest(decider: Decider, share: float) -> None:
    """Predict a share of the measured step: all stages of a pipeline wait for the slowest one."""
    known, chosen = decider.known, decider.chosen
    assert known is not None and chosen is not None
    if known.costs.floor_ms is not None:
        decider.chosen = chosen._replace(pipeline_ms=share * known.costs.floor_ms)
