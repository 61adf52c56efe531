#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares runs without offload, with it, and within a budget.

python tools/quickstart.py DIRECTORY

DIRECTORY holds plain.jsonl, offload.jsonl and budget.jsonl (the trainer's --metrics-json).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

MIB = 1 << 20
Step = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args(arguments).directory
    try:
        plain, offload, budget = (load(directory / f"{name}.jsonl") for name in ("plain", "offload", "budget"))
    except (OSError, ValueError, KeyError) as error:
        print(f"quickstart.py: error: cannot read the runs in {directory}: {error!r}", file=sys.stderr)
        return 1
    Console().print(comparison(plain, offload, budget), closing(plain, offload), sep="\n")
    return 0 if has_same_losses(plain, offload) and has_same_losses(plain, budget) else 1


def load(path: Path) -> list[Step]:
    """Read the metrics of the steps of a run."""
    records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    steps = [record for record in records if "loss" in record]  # the others report evaluations
    if not steps:
        raise ValueError(f"{path} holds no step: the run ended before its first one")
    return steps


def comparison(plain: list[Step], offload: list[Step], budget: list[Step]) -> Table:
    """Make the table of the three runs; figures of memory are of the last step."""
    plans = [rank["offload"]["plan"] or {} for rank in budget[-1]["ranks"]]
    decided = [plan for plan in plans if plan.get("predicted_step_ms") is not None]
    table = Table("", title=f"{len(plain)} training steps", title_justify="left")
    size = f" of {_mib(decided[0]['budget_bytes'])} a rank" if decided else ": no plan"
    for column in ("no offload", "offload", f"a budget{size}, and no other setting"):
        table.add_column(column, justify="right")

    def add(title: str, form: Callable[[float], str], figures: Iterable[float], predicted: float | None = None) -> None:
        before, *others = figures
        with_change = [f"{form(after)} ({after / before - 1:+.0%})" for after in others]
        with_change[-1] += "" if predicted is None else f"\n{form(predicted)} predicted"
        table.add_row(title, form(before), *with_change)

    equal = [f"[{style}]{word}[/]" for style, word in map(_verdict, (plain, plain), (offload, budget))]
    table.add_row("losses equal to the last bit", "", *equal)
    predicted_ms = max((plan["predicted_step_ms"] for plan in decided), default=None)
    add("step time", "{:,.0f} ms".format, (_step_ms(plain), _step_ms(offload), budget[-1]["step_ms"]), predicted_ms)
    for rank, ranks in enumerate(zip(*(run[-1]["ranks"] for run in (plain, offload, budget)), strict=True)):
        predicted = plans[rank].get("predicted_peak_bytes")
        add(f"saved bytes on the device, peak, rank {rank}", _mib, map(_peak_resident, ranks), predicted)
        add(f"process memory (RSS), peak, rank {rank}", _mib, (one["rss_peak_bytes"] for one in ranks))
    for way in ("out", "in"):
        sizes = (_mib(run[-1]["offload"][f"copied_{way}_bytes"]) for run in (offload, budget))
        table.add_row(f"copied {way} in a step", "", *sizes)
    late = (sum(step["offload"]["prefetch_misses"] for step in run) for run in (offload, budget))
    table.add_row("came back late, in all steps", "", *(f"{number} tensors" for number in late))
    return table


def _verdict(plain: list[Step], run: list[Step]) -> tuple[str, str]:
    return ("green", "yes") if has_same_losses(plain, run) else ("bold red", "NOT EQUAL")


def closing(plain: list[Step], offload: list[Step]) -> str:
    """Return a sentence on what came out, and where to go on."""
    before, after = (_peak_resident(run[-1]["ranks"][0]) for run in (plain, offload))
    return (
        f"{_mib(before - after)} of {_mib(before)} saved less on rank 0. Without a GPU the copies and the computation "
        "share the cores. Next: docs/getting-started.md"
    )


def has_same_losses(one: list[Step], other: list[Step]) -> bool:
    """Return whether the steps that both runs have took the same losses, to the last bit."""
    return all(mine["loss"] == its["loss"] for mine, its in zip(one, other, strict=False))


def _step_ms(run: list[Step]) -> float:
    """Return the median, without the first two steps, which allocate what the later ones reuse."""
    return statistics.median(step["step_ms"] for step in run[2:] or run)


def _peak_resident(rank: dict[str, Any]) -> int:
    return int(rank["offload"]["peak_resident_saved_bytes"])


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.0f} MiB"


if __name__ == "__main__":
    sys.exit(main())
