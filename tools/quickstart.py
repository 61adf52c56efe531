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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

MIB = 1 << 20
COLUMNS = "losses\nequal", "step,\nms", "saved on\ndevice,\npeak", "process\n(RSS),\npeak", "copied\nout", "came\nlate"
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
    """Make the table of the three runs, with two rows for the budget; figures of memory are of the last step."""
    plans = [rank["offload"]["plan"] or {} for rank in budget[-1]["ranks"]]
    title = f"{len(plain)} training steps; MiB of {'/'.join(f'rank {rank}' for rank in range(len(plans)))}"
    table = Table("", title=title, title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_row("no offload", "", _ms(_step_ms(plain)), *_peaks(plain))
    table.add_row("offload", _verdict(plain, offload), _ms(_step_ms(offload)), *_peaks(offload), *_copies(offload))
    table.add_section()
    table.add_row("budget", "", "", _mibs(plan.get("budget_bytes", 0) for plan in plans))
    table.add_row("budget, predicted", "", *_predicted(plans))
    measured = _ms(budget[-1]["step_ms"]), *_peaks(budget), *_copies(budget)
    table.add_row("budget, measured", _verdict(plain, budget), *measured)
    return table


def _peaks(run: list[Step]) -> list[str]:
    ranks = run[-1]["ranks"]
    return [_mibs(map(_peak_resident, ranks)), _mibs(rank["rss_peak_bytes"] for rank in ranks)]


def _copies(run: list[Step]) -> list[str]:
    copied = _mibs(rank["offload"]["copied_out_bytes"] for rank in run[-1]["ranks"])
    return [copied, str(sum(step["offload"]["prefetch_misses"] for step in run))]


def _predicted(plans: list[dict[str, Any]]) -> list[str]:
    """Return the time of a step, which is that of the slowest rank, and the peak of each rank."""
    if not all(plan.get("predicted_step_ms") for plan in plans):
        return ["no plan"]
    return [
        _ms(max(plan["predicted_step_ms"] for plan in plans)),
        _mibs(plan["predicted_peak_bytes"] for plan in plans),
    ]


def _verdict(plain: list[Step], run: list[Step]) -> str:
    return "[green]yes[/]" if has_same_losses(plain, run) else "[bold red]NO[/]"


def closing(plain: list[Step], offload: list[Step]) -> str:
    """Return a sentence on what came out, and where to go on."""
    before, after = (_peak_resident(run[-1]["ranks"][0]) for run in (plain, offload))
    return (
        f"With offload rank 0 keeps at most {_mib(after)} MiB of saved tensors on the device, without it "
        f"{_mib(before)} MiB. Without a GPU the copies and the computation share the cores. Next: "
        "docs/getting-started.md"
    )


def has_same_losses(one: list[Step], other: list[Step]) -> bool:
    """Return whether the steps that both runs have took the same losses, to the last bit."""
    return all(mine["loss"] == its["loss"] for mine, its in zip(one, other, strict=False))


def _step_ms(run: list[Step]) -> float:
    """Return the median, without the first two steps, which allocate what the later ones reuse."""
    return statistics.median(step["step_ms"] for step in run[2:] or run)


def _peak_resident(rank: dict[str, Any]) -> int:
    return int(rank["offload"]["peak_resident_saved_bytes"])


def _mibs(sizes: Iterable[float]) -> str:
    return "/".join(map(_mib, sizes))


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.0f}"


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:,.0f}"


if __name__ == "__main__":
    sys.exit(main())
