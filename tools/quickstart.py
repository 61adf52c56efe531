#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares runs without offload, with it, and with a budget: a table, and a plot of where the bytes are.

python tools/quickstart.py DIRECTORY

DIRECTORY holds plain.jsonl, offload.jsonl, budget.jsonl (the trainer's --metrics-json) and plain.timeline.json,
offload.timeline.json (its --timeline-json). The plot is written to DIRECTORY/residency.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
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
    tables = comparison(plain, offload), f"plot: {plot}", budget_table(plain, budget), closing(plain, offload)
    Console().print(*tables, sep="\n")
    return 0 if has_same_losses(plain, offload) and has_same_losses(plain, budget) else 1


def load(path: Path) -> list[Step]:
    """Read the metrics of the steps of a run."""
    records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    steps = [record for record in records if "loss" in record]  # the others report evaluations
    if not steps:
        raise ValueError(f"{path} holds no step: the run ended before its first one")
    return steps


def comparison(plain: list[Step], offload: list[Step]) -> Table:
    """Make the table of the two runs; figures of memory are of the last step, which the plot shows."""
    table = _table(
        f"{len(plain)} training steps, without and with activation offload", "no offload", "offload", "change"
    )
    num_equal = sum(map(eq, _losses(plain), _losses(offload)))
    verdict = "[green]yes[/]" if has_same_losses(plain, offload) else "[bold red]NO[/]"
    table.add_row("losses equal to the last bit", "", f"{num_equal} of {len(plain)}", verdict)
    before, after = _step_ms(plain), _step_ms(offload)
    table.add_row("step time", f"{before:,.0f} ms", f"{after:,.0f} ms", f"{after / before - 1:+.1%}")
    titles = {"resident saved bytes, peak": _peak_resident, "process memory (RSS), peak": lambda r: r["rss_peak_bytes"]}
    for title, figure in titles.items():
        for rank, ranks in enumerate(zip(plain[-1]["ranks"], offload[-1]["ranks"], strict=True)):
            before, after = map(figure, ranks)
            table.add_row(f"{title}, rank {rank}", _mib(before), _mib(after), f"{after / before - 1:+.0%}")
    for way in ("out", "in"):
        table.add_row(f"copied {way} in a step", "", _mib(offload[-1]["offload"][f"copied_{way}_bytes"]), "")
    if late := sum(step["offload"]["prefetch_misses"] for step in offload):
        table.add_row("came back late, in all steps", "", f"{late} tensors", "")
    return table


def budget_table(plain: list[Step], budget: list[Step]) -> Table:
    """Make the table of the run that was given nothing but a budget: what it predicted, and what was measured."""
    last = budget[-1]
    plans = [rank["offload"]["plan"] for rank in last["ranks"]]
    decided = [plan for plan in plans if plan is not None]
    title = f"with a budget of {_mib(decided[0]['budget_bytes'])} a rank, and no other setting" if decided else "budget"
    table = _table(title, "no offload", "predicted", "measured")
    verdict = "[green]equal[/]" if has_same_losses(plain, budget) else "[bold red]NOT EQUAL[/]"
    table.add_row("losses to the last bit", f"{plain[-1]['loss']:.6f}", "", verdict)
    predicted_ms = max((plan["predicted_step_ms"] for plan in decided), default=0.0)
    table.add_row("step time", *(f"{ms:,.0f} ms" for ms in (_step_ms(plain), predicted_ms, last["step_ms"])))
    for rank, (plan, before, after) in enumerate(zip(plans, plain[-1]["ranks"], last["ranks"], strict=True)):
        predicted = "no plan" if plan is None else _mib(plan["predicted_peak_bytes"])
        sizes = _mib(_peak_resident(before)), predicted, _mib(_peak_resident(after))
        table.add_row(f"resident saved bytes, peak, rank {rank}", *sizes)
    return table


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


def _table(title: str, *columns: str) -> Table:
    table = Table("", title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


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
