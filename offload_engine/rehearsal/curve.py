# SPDX-License-Identifier: Apache-2.0
"""Predicts what every budget would take, as a curve for a plot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from offload_engine.planning.frontier import frontier
from offload_engine.rehearsal.chosen import RankChooser
from offload_engine.rehearsal.forecast import Forecast, StepForecast, step_with

_PARTS: Final = 8
"""Of the way from the lowest budget to the one that all fits."""


def with_curve(forecast: Forecast, choosers: Sequence[RankChooser]) -> Forecast:
    """Add what steps take within budgets from the lowest to one that all fits.

    Args:
        forecast: of all ranks.
        choosers: one for each rank, in the same order.
    """
    lowest, tops = zip(*(chooser.ends for chooser in choosers), strict=True)
    low, high = max(lowest), max(tops)
    steps = [_step_within(forecast, choosers, low + (high - low) * part // _PARTS) for part in range(_PARTS + 1)]
    found = [step for step in steps if step is not None]
    return forecast._replace(curve=frontier(found, lambda step: (step.gpu_bytes, step.milliseconds)))


def _step_within(forecast: Forecast, choosers: Sequence[RankChooser], budget_bytes: int) -> StepForecast | None:
    chosen = [best for chooser in choosers if (best := chooser.within(budget_bytes)) is not None]
    return step_with(forecast, chosen) if len(chosen) == len(choosers) else None
