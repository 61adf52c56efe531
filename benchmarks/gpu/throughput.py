# SPDX-License-Identifier: Apache-2.0
"""Tokens a second beside the memory that they take: what offload is worth against recomputation."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.plots import picture
from benchmarks.tables import Rows, mib, number

Record = dict[str, Any]

_MARKERS = {
    "none": "*",
    "ours": "o",
    "ours+recompute": "s",
    "incumbent": "^",
    "incumbent+recompute": "v",
    "recompute": "X",
    "copies": "D",
    "budget": "P",
}
_IN_WORDS = {
    "none": "no offload",
    "ours": "this engine",
    "incumbent": "megatron-core's own offload",
    "recompute": "full recomputation",
    "budget": "this engine, within a budget of",
}
_LEGEND_WIDTH = 44
_INCHES_OF_A_LINE = 0.155


def throughput(summaries: Sequence[Record], records: Sequence[Record]) -> list[Record]:
    """Make one record per contender: tokens/s of all ranks, the peak reserved of the worst rank, and both over full
    recomputation's where that took part."""
    run = next((record for record in records if record["kind"] == "run"), None)
    if run is None:
        return []
    labels = list(dict.fromkeys(summary["label"] for summary in summaries))
    found = [_of([s for s in summaries if s["label"] == label], tokens_of_step(run)) for label in labels]
    base = next((one for one in found if one["contender"] == "recompute"), None)
    for one in found if base else ():
        one["over_recompute"] = one["tokens_per_s"] / base["tokens_per_s"]
        one["reserved_over_recompute"] = one["peak_reserved_bytes"] / base["peak_reserved_bytes"]
    return found


def in_words(label: str) -> str:
    """Label an entry as in a picture, for readers who have not seen the command line."""
    kind, _, what = label.partition(" ")
    name = _IN_WORDS.get(kind, kind)
    shown = what.replace(" @", "; ").replace("+", "; recomputing ").replace(",", ", ")
    return f"{name}: {shown}" if shown else name


def tokens_of_step(run: Record) -> int:
    """Return the tokens of one step, of all data-parallel ranks."""
    shape = run["shape"]
    return int(shape["seq"] * shape["mbs"] * shape["nmb"] * run["world_size"] // shape["pp"])


def _of(own: Sequence[Record], tokens: int) -> Record:
    return {
        "kind": "throughput",
        "label": own[0]["label"],
        "contender": own[0]["contender"],
        "tokens_per_s": tokens / own[0]["step_ms_median"] * 1e3,
        "peak_reserved_bytes": max(summary["peak_reserved_bytes"] for summary in own),
    }


def throughput_table(found: Sequence[Record]) -> Rows:
    """Make the table. A second ratio of 1 or less means equal memory, or less."""
    head = ("contender", "tokens/s", "reserved MiB", "tokens/s over recompute", "reserved over recompute")
    rows = [
        (
            *(one["label"], number(one["tokens_per_s"], 0), mib(one["peak_reserved_bytes"])),
            *(number(one.get(f"{what}over_recompute"), 4) for what in ("", "reserved_")),
        )
        for one in found
    ]
    return Rows("throughput, all ranks; memory of the worst rank", head, rows)


def plot_trade(found: Sequence[Record], file: Path) -> None:
    """Plot tokens/s over reserved memory, a point for each contender: further up and to the left is better."""
    from matplotlib import colormaps

    labels = [textwrap.fill(in_words(one["label"]), _LEGEND_WIDTH) for one in found]
    num_lines = sum(label.count("\n") + 2 for label in labels)
    with picture(file, figsize=(11, max(5, _INCHES_OF_A_LINE * num_lines))) as (figure, axes):
        for index, (one, label) in enumerate(zip(found, labels, strict=True)):
            marker = _MARKERS[one["contender"]]
            gib = one["peak_reserved_bytes"] / (1 << 30)
            axes.scatter(
                gib, one["tokens_per_s"], s=110, color=colormaps["tab20"](index), marker=marker, label=label, zorder=2
            )
        axes.set(xlabel="peak reserved on the worst rank, GiB", ylabel="tokens a second, all ranks")
        axes.set_title("circles: this engine; squares: this engine beside recomputation", loc="left", fontsize=9)
        axes.grid(alpha=0.3)
        figure.legend(loc="outside right upper", fontsize=8, frameon=False, labelspacing=0.8)
