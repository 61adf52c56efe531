# SPDX-License-Identifier: Apache-2.0
"""Budgets that the engine keeps by itself: which sizes to try, and what it had decided when. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any


def decision_of(budget: Any) -> dict[str, Any]:
    """Return what a budget's controller has decided, as fields of a record; nothing before its first decision."""
    if budget.summary is None:
        return {}
    names = {"predicted_peak_bytes": "predicted_bytes", "predicted_step_ms": "predicted_ms"}
    return {names.get(name, name): value for name, value in asdict(budget.summary).items() if name != "budget_bytes"}


def first_prediction(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the first plan predicted, and what the step held that judged it: the last before another prediction.

    The first step with a plan fills an empty allocator, and may have groups that no plan knew. The time is that before
    any of these steps corrected it.

    Args:
        steps: of a budget that begins; those that were planned have "predicted_bytes" and "predicted_ms", and all
            "held_bytes".
    """
    planned = [step for step in steps if step.get("predicted_bytes") is not None]
    first = [step for step in planned if step["predicted_bytes"] == planned[0]["predicted_bytes"]]
    judged = first[-1] if first else {}
    found = {f"first_{name}": judged.get(name) for name in ("predicted_bytes", "held_bytes")}
    return found | {"first_predicted_ms": planned[0].get("predicted_ms") if planned else None}


def predicted_step_ms(turns: Sequence[Mapping[str, Any]], name: str = "predicted_ms") -> float | None:
    """Return the predicted time of a step, as steps are timed: on the slowest rank, and of all rounds the median.

    None if a rank has decided nothing.

    Args:
        turns: of one budget, each with its "round", and "budget", which has `name` once there is a decision.
        name: of a prediction.
    """
    rounds: dict[int, list[float]] = {}
    for turn in turns:
        milliseconds = turn["budget"].get(name)
        if milliseconds is None:
            return None
        rounds.setdefault(turn["round"], []).append(milliseconds)
    return statistics.median(map(max, rounds.values()))


def spread(least: int, most: int, num: int) -> list[int]:
    """Spread so many budgets evenly from one size to another."""
    return [least + max(0, most - least) * index // max(1, num - 1) for index in range(num)]
