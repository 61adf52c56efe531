#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares runs without offload, with it, and within a budget: a table, and a plot of where the bytes are.

python tools/quickstart.py DIRECTORY

DIRECTORY holds plain.jsonl, offload.jsonl, budget.jsonl (the trainer's --metrics-json) and plain.timeline.json,
offload.timeline.json (its --timeline-json). The plot is written to DIRECTORY/residency.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from operator import eq
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

MIB = 1 << 20
COLORS = {"plain": "tab:orange", "offload": "tab:blue", "F": "tab:green", "B": "tab:purple"}
Step = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args(arguments).directory
    plot = directory / "residency.png"
    try:
        plain, offload, budget = (load(directory / f"{name}.jsonl") for name in ("plain", "offload", "budget"))
        draw({name: directory / f"{name}.timeline.json" for name in ("plain", "offload")}, plot)
    except (OSError, ValueError, KeyError) as error:
        print(f"quickstart.py: error: cannot read the runs in {directory}: {error!r}", file=sys.stderr)
        return 1
    Console().print(comparison(plain, offload, budget), f"plot: {plot}", closing(plain, offload), sep="\n")
    return 0 if has_same_losses(plain, offload) and has_same_losses(plain, budget) else 1


def load(path: Path) -> list[Step]:
    """Read the metrics of the steps of a run."""
    records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    steps = [record for record in records if "loss" in record]  # the others report evaluations
    if not steps:
        raise ValueError(f"{path} holds no step: the run ended before its first one")
    return steps


def comparison(plain: list[Step], offload: list[Step], budget: list[Step]) -> Table:
    """Make the table of the three runs; figures of memory are of the last step, which the plot shows."""
    plans = [rank["offload"]["plan"] for rank in budget[-1]["ranks"]]
    decided = [plan for plan in plans if plan is not None]
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
        predicted = None if plans[rank] is None else plans[rank]["predicted_peak_bytes"]
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
    return all(map(eq, _losses(one), _losses(other)))


def _losses(run: list[Step]) -> list[float]:
    return [step["loss"] for step in run]


def _step_ms(run: list[Step]) -> float:
    """Return the median, without the first two steps, which allocate what the later ones reuse."""
    return statistics.median(step["step_ms"] for step in run[2:] or run)


def _peak_resident(rank: dict[str, Any]) -> int:
    return int(rank["offload"]["peak_resident_saved_bytes"])


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.0f} MiB"


def draw(timelines: dict[str, Path], path: Path) -> None:
    """Write the plot: a panel for each rank, with both runs and a ribbon of the last one's forwards and backwards."""
    runs = {name: json.loads(file.read_text())["ranks"] for name, file in timelines.items()}
    num_ranks = len(runs["plain"])
    options: dict[str, Any] = {"sharex": True, "sharey": True, "squeeze": False, "layout": "constrained"}
    figure, panels = plt.subplots(num_ranks, 1, figsize=(10, 1.4 + 2.5 * num_ranks), **options)
    for rank, panel in enumerate(panels[:, 0]):
        for kind, begin_s, end_s in runs["offload"][rank].get("spans", []):
            panel.axvspan(begin_s, end_s, ymin=0.95, color=COLORS[kind], alpha=0.5, linewidth=0)
        for name, ranks in runs.items():
            seconds, nbytes = zip((0.0, 0), *ranks[rank]["timeline"], strict=True)
            mib = [value / MIB for value in nbytes]
            label = f"{name}: peak {max(mib):,.0f} MiB"
            panel.fill_between(seconds, mib, step="post", color=COLORS[name], alpha=0.2, linewidth=0)
            panel.step(seconds, mib, where="post", color=COLORS[name], label=label)
        chunks = [
            Patch(color=COLORS[kind], alpha=0.5, label=label) for kind, label in (("F", "forward"), ("B", "backward"))
        ]
        panel.legend(handles=[*panel.get_legend_handles_labels()[0], *chunks], loc="upper left", fontsize=8)
        panel.set_title(f"pipeline rank {rank}", loc="left", fontsize=10)
        panel.set(ylabel="resident, MiB", ylim=(0, 1.1 * panel.get_ylim()[1]), xlim=(0, None))
        panel.grid(axis="y", alpha=0.3)
    panels[-1, 0].set_xlabel("time since the step began, s")
    figure.suptitle("Saved activations on the device over one training step")
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
