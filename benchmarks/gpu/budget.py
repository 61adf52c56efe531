# SPDX-License-Identifier: Apache-2.0
"""A contender that is told one number, and what it has come to beside settings that were made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.budgets import decision_of, first_prediction, predicted_step_ms, spread
from benchmarks.records import Records
from benchmarks.tables import Column, Record, shown

from .contenders import Ours
from .settings import Entry

_SETTLED = 3
"""From this planned step on none may hold more than its budget."""
_DECIDED = ("predicted_bytes", "kept_bytes", "recomputed_bytes", "offloaded_bytes")


class Budget(Ours):
    """The engine with `gpu_budget`, and nothing else set. Warm-up lasts until its decision has settled."""

    def attach(self) -> None:
        self._steps: list[Record] = []
        super().attach()

    def is_ready(self) -> bool:
        budget = self._engine().budget
        free, total = torch.cuda.mem_get_info()
        self._steps.append({"state": budget.state.name, "held_bytes": total - free, **decision_of(budget)})
        return bool(budget.is_settled)

    def details(self) -> Record:
        budget = self._engine().budget
        planning = {"planning_ms": budget.planning_ms, "planning_steps": budget.num_planning_steps}
        own = {"gpu_budget": self.entry.gpu_budget, "steps": self._steps}
        return {"budget": {**own, **first_prediction(self._steps), **planning, **decision_of(budget)}}


def entries_between(turns: Sequence[Record], num: int) -> list[Entry]:
    """Spread budgets from everything offloaded to no offload, of which `turns` of one round have the ends.

    One more is as large as what full recomputation held, if that ran: the two compare at equal memory.
    """
    least = max(turn["budget"]["lowest_bytes"] for turn in turns if turn["contender"] == "budget")
    most = max(held_bytes(turn) for turn in turns if turn["contender"] == "none")
    least += max(0, most - least) // 16  # what is predicted and has not run may be above that
    recomputing = (held_bytes(turn) for turn in turns if turn["contender"] == "recompute")
    equal = [nbytes for nbytes in [max(recomputing, default=0)] if nbytes > least]
    return [
        Entry("budget", engine=(("gpu_budget", nbytes),))
        for nbytes in dict.fromkeys([*spread(least, most, num), *equal])
    ]


def held_bytes(turn: Mapping[str, Any]) -> int:
    """Return the most that the process held on its GPU in a turn, in bytes."""
    return int(turn["peak_reserved_bytes"] + turn.get("outside_bytes", 0))


def budgets(summaries: Sequence[Record], records: Records) -> list[Record]:
    """Make one record for each budget: what was predicted, what was measured, and the best made by hand that fits."""
    turns: dict[str, list[Record]] = {}
    for record in records.of("turn"):
        turns.setdefault(record["label"], []).append(record)
    of_label = {summary["label"]: summary for summary in summaries}
    step_ms = {label: summary["step_ms_median"] for label, summary in of_label.items()}
    worst = {label: max(own, key=held_bytes) for label, own in turns.items()}
    held = {label: held_bytes(turn) for label, turn in worst.items()}
    by_hand = [label for label in step_ms if "budget" not in worst[label]]
    found = []
    for label in (label for label in step_ms if label not in by_hand):
        one = _prediction(turns[label], worst[label])
        fitting = [name for name in by_hand if held[name] <= (one["budget_bytes"] or max(held.values()))]
        best = min(fitting, key=lambda name: step_ms[name], default=None)
        ms, recomputing = step_ms[label], step_ms.get("recompute")
        one |= {"label": label, "held_bytes": held[label], "step_ms": ms, "ratio": of_label[label].get("ratio")}
        one |= {"best": best, "over_best": ms / step_ms[best] if best else None}
        found.append(one | {"rate_over_recompute": recomputing / ms if recomputing else None})
    return found


def _prediction(turns: Sequence[Record], worst: Record) -> Record:
    """Return what was decided in the turn that held most; the first prediction and the time are of all of them."""
    details, limit = worst["budget"], worst["budget"]["gpu_budget"]
    planned = [[step for step in turn["budget"]["steps"] if step.get("predicted_bytes")] for turn in turns]
    late = [step["held_bytes"] for steps in planned for step in steps[_SETTLED - 1 :]]
    firsts = [first_prediction(turn["budget"]["steps"]) for turn in turns]
    names = ("planning_ms", "planning_steps", *_DECIDED)
    return {
        "kind": "budget",
        "budget_bytes": limit,
        **max(firsts, key=lambda first: abs((first["first_held_bytes"] or 0) - (first["first_predicted_bytes"] or 0))),
        "is_above": limit is not None and max([*map(held_bytes, turns), *late]) > limit,
        **{name: details.get(name) for name in names},  # none where no decision came
        **{name: predicted_step_ms(turns, name) for name in ("first_predicted_ms", "predicted_ms")},
    }


BUDGETS: dict[str, Column] = {
    "MiB: budget": lambda one: shown(one["budget_bytes"], "MiB") or "auto",
    "best by hand that fits": "best",
    "predicted first": ("first_predicted_bytes", "MiB"),
    "held then": ("first_held_bytes", "MiB"),
    "predicted": ("predicted_bytes", "MiB"),
    "held": ("held_bytes", "MiB"),
    "above": "is_above",
    "predicted ms first": ("first_predicted_ms", ",.1f"),
    "predicted ms": ("predicted_ms", ",.1f"),
    "ms": ("step_ms", ",.1f"),
    "over none": ("ratio", ".4f"),
    "over it": ("over_best", ".4f"),
    "throughput over full recomputation": ("rate_over_recompute", ".3f"),
    "planned in ms": ("planning_ms", ",.0f"),
    "steps": ("planning_steps", ""),
    "moved": ("offloaded_bytes", "MiB"),
    "recomputed": ("recomputed_bytes", "MiB"),
}
"""Columns of the table of budgets. Held is reserved, and what is outside of torch."""
