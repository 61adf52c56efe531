#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares runs without offload, with it, and with a budget: a table, and a plot of where the bytes are.

python tools/quickstart.py DIRECTORY

DIRECTORY holds plain.jsonl, offload.jsonl, budget.jsonl (the trainer's --metrics-json) and plain.timeline.json,
offload.timeline.json (its --timeline-json). The plot is written to DIRECTORY/residency.png.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import eq
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

MIB = 1 << 20
INK, MUTED, GRID = "#1f2430", "#6b7280", "#e5e7eb"
PLAIN, OFFLOAD = ("#e07a3f", "#fbe8dd"), ("#2563a8", "#cfdff0")  # line, fill
FORWARD, BACKWARD = "#9fd3ac", "#c3aee0"


@dataclass(frozen=True)
class Run:
    """The metrics of one run: one object a step."""

    steps: list[dict[str, Any]]

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read the trainer's metrics.

        Raises:
            ValueError: if there is no step in them.
        """
        records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        steps = [record for record in records if "loss" in record]  # the others report evaluations
        if not steps:
            raise ValueError(f"{path} holds no step: the run ended before its first one")
        return cls(steps)

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.steps]

    @property
    def step_ms(self) -> float:
        """Return the median, without the first two steps, which allocate what the later ones reuse."""
        settled = self.steps[2:] or self.steps
        return statistics.median(step["step_ms"] for step in settled)

    def peak(self, rank: int, figure: Callable[[dict[str, Any]], int]) -> int:
        """Return a figure of the last step on one rank: the step that the plot shows."""
        return figure(self.steps[-1]["ranks"][rank])

    @property
    def num_ranks(self) -> int:
        return len(self.steps[0]["ranks"])

    def last(self, name: str) -> int:
        """Return an offload counter of the last step, all ranks together."""
        return self.steps[-1]["offload"][name]

    def total(self, name: str) -> int:
        """Return an offload counter, all steps and ranks together."""
        return sum(step["offload"][name] for step in self.steps)


@dataclass(frozen=True)
class Span:
    """The forward ("F") or backward ("B") of one chunk."""

    kind: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """Resident saved bytes of one rank over one step, from the step's begin."""

    seconds: list[float]
    mib: list[float]
    spans: list[Span]

    @classmethod
    def load_all(cls, path: Path) -> list[Timeline]:
        """Load one timeline per rank."""
        return [cls._from_json(rank) for rank in json.loads(path.read_text())["ranks"]]

    @classmethod
    def _from_json(cls, rank: dict[str, Any]) -> Timeline:
        points = rank["timeline"]
        return cls(
            seconds=[0.0, *(t for t, _ in points)],
            mib=[0.0, *(nbytes / MIB for _, nbytes in points)],
            spans=[Span(*span) for span in rank.get("spans", [])],
        )

    @property
    def peak_mib(self) -> float:
        return max(self.mib)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args(arguments).directory
    try:
        plain, offload, budget = (Run.load(directory / f"{name}.jsonl") for name in ("plain", "offload", "budget"))
        timelines = [Timeline.load_all(directory / f"{name}.timeline.json") for name in ("plain", "offload")]
    except (OSError, ValueError, KeyError) as error:
        print(f"quickstart.py: error: cannot read the runs in {directory}: {error!r}", file=sys.stderr)
        return 1
    plot = directory / "residency.png"
    draw(timelines[0], timelines[1], plot)
    Console().print(comparison(plain, offload, plot))
    Console().print(budget_table(plain, budget))
    print(closing(plain, offload))
    return 0 if plain.losses == offload.losses and has_same_losses(plain, budget) else 1


def comparison(plain: Run, offload: Run, plot: Path) -> Table:
    """Make the table."""
    same = plain.losses == offload.losses
    table = Table(title=f"{len(plain.steps)} training steps, without and with activation offload", title_justify="left")
    table.add_column("")
    for column in ("no offload", "offload", "change"):
        table.add_column(column, justify="right")
    verdict = "[green]yes[/]" if same else "[bold red]NO[/]"
    equal = f"{sum(map(eq, plain.losses, offload.losses))} of {len(plain.losses)}"
    table.add_row("losses equal to the last bit", "", equal, verdict)
    table.add_row("step time", f"{plain.step_ms:,.0f} ms", f"{offload.step_ms:,.0f} ms", _change(plain, offload))
    figures = (("resident saved bytes, peak", _peak_resident), ("process memory (RSS), peak", _peak_rss))
    for (title, figure), rank in itertools.product(figures, range(plain.num_ranks)):
        before, after = plain.peak(rank, figure), offload.peak(rank, figure)
        table.add_row(f"{title}, rank {rank}", _mib(before), _mib(after), f"{after / before - 1:+.0%}")
    table.add_row("copied out in a step", "", _mib(offload.last("copied_out_bytes")), "")
    table.add_row("copied in in a step", "", _mib(offload.last("copied_in_bytes")), "")
    if late := offload.total("prefetch_misses"):
        table.add_row("came back late, in all steps", "", f"{late} tensors", "")
    table.caption = f"plot: {plot}"
    table.caption_justify = "left"
    return table


def closing(plain: Run, offload: Run) -> str:
    """Return a sentence on what came out, and where to go on."""
    before, after = (run.peak(0, _peak_resident) for run in (plain, offload))
    return (
        f"{_mib(before - after)} of {_mib(before)} saved less on rank 0, at {_change(plain, offload)} of the step: "
        "without a GPU the copies and the computation share the cores. Next: docs/getting-started.md"
    )


def budget_table(plain: Run, budget: Run) -> Table:
    """Make the table of the run that was given nothing but a budget: what it predicted, and what was measured."""
    plans = [rank["offload"]["plan"] for rank in budget.steps[-1]["ranks"]]
    decided = [plan for plan in plans if plan is not None]
    title = f"with a budget of {_mib(decided[0]['budget_bytes'])} a rank, and no other setting" if decided else "budget"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in ("no offload", "predicted", "measured"):
        table.add_column(column, justify="right")
    verdict = "[green]equal[/]" if has_same_losses(plain, budget) else "[bold red]NOT EQUAL[/]"
    table.add_row("losses to the last bit", f"{plain.losses[-1]:.6f}", "", verdict)
    predicted_ms = max((plan["predicted_step_ms"] for plan in decided), default=0.0)
    measured_ms = budget.steps[-1]["step_ms"]
    table.add_row("step time", f"{plain.step_ms:,.0f} ms", f"{predicted_ms:,.0f} ms", f"{measured_ms:,.0f} ms")
    for rank, plan in enumerate(plans):
        peak = _peak_resident(budget.steps[-1]["ranks"][rank])
        predicted = "no plan" if plan is None else _mib(plan["predicted_peak_bytes"])
        before = _mib(plain.peak(rank, _peak_resident))
        table.add_row(f"resident saved bytes, peak, rank {rank}", before, predicted, _mib(peak))
    return table


def has_same_losses(one: Run, other: Run) -> bool:
    """Return whether the steps that both runs have took the same losses, to the last bit."""
    return all(mine == theirs for mine, theirs in zip(one.losses, other.losses, strict=False))


def _peak_resident(rank: dict[str, Any]) -> int:
    return rank["offload"]["peak_resident_saved_bytes"]


def _peak_rss(rank: dict[str, Any]) -> int:
    return rank["rss_peak_bytes"]


def _change(plain: Run, offload: Run) -> str:
    return f"{offload.step_ms / plain.step_ms - 1:+.1%}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:,.0f} MiB"


def draw(plain: list[Timeline], offload: list[Timeline], path: Path) -> None:
    """Write the plot: one panel a rank, both runs in each, forward and backward of the offload run shaded."""
    style = {"font.size": 10, "font.family": "DejaVu Sans", "axes.edgecolor": GRID, "text.color": INK}
    with plt.rc_context(style):
        figure, panels = plt.subplots(
            len(plain), 1, figsize=(10, 1.4 + 2.5 * len(plain)), sharex=True, sharey=True, squeeze=False
        )
        for rank, panel in enumerate(panels[:, 0]):
            _draw_rank(panel, rank, plain[rank], offload[rank])
        panels[-1, 0].set_xlabel("time since the step began, s", color=MUTED)
        panels[0, 0].set_xlim(0, max(t.seconds[-1] for t in (*plain, *offload)))
        panels[0, 0].set_ylim(0, 1.25 * max(t.peak_mib for t in (*plain, *offload)))
        title = "Saved activations on the device over one training step"
        figure.suptitle(title, x=0.012, ha="left", fontsize=14, weight="bold")
        if any(timeline.spans for timeline in offload):
            labels = {"run with offload:": "none", "forward": FORWARD, "backward": BACKWARD}
            handles = [Patch(color=color, label=label) for label, color in labels.items()]
            panels[0, 0].legend(
                handles=handles,
                loc="lower right",
                bbox_to_anchor=(1.01, 0.98),
                ncols=3,
                frameon=False,
                labelcolor=MUTED,
            )
        figure.tight_layout(rect=(0, 0, 1, 0.98))
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _draw_rank(panel: Axes, rank: int, plain: Timeline, offload: Timeline) -> None:
    for span in offload.spans:  # a ribbon along the top: shading the whole panel would tint the curves
        color = FORWARD if span.kind == "F" else BACKWARD
        panel.axvspan(span.begin_s, span.end_s, ymin=0.95, color=color, linewidth=0)
    for timeline, (color, fill), label in ((plain, PLAIN, "no offload"), (offload, OFFLOAD, "offload")):
        panel.fill_between(timeline.seconds, timeline.mib, step="post", color=fill, linewidth=0)
        panel.step(timeline.seconds, timeline.mib, where="post", color=color, linewidth=1.5)
        _mark_peak(panel, timeline, color, label)
    panel.set_title(f"pipeline rank {rank}", loc="left", color=MUTED, fontsize=10)
    panel.set_ylabel("resident, MiB", color=MUTED)
    panel.tick_params(colors=MUTED, length=0)
    panel.grid(axis="y", color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right", "left"]].set_visible(False)


def _mark_peak(panel: Axes, timeline: Timeline, color: str, label: str) -> None:
    at = timeline.mib.index(timeline.peak_mib)
    panel.axhline(timeline.peak_mib, color=color, linewidth=0.8, linestyle=(0, (4, 3)))
    panel.annotate(
        f"{label}: peak {timeline.peak_mib:,.0f} MiB",
        (timeline.seconds[at], timeline.peak_mib),
        xytext=(4, 4),
        textcoords="offset points",
        color=color,
        weight="bold",
    )


if __name__ == "__main__":
    sys.exit(main())
