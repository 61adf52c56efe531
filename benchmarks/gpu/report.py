# SPDX-License-Identifier: Apache-2.0
"""What the records of a run amount to: ratios, throughput, tables and the plot. Pure functions."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.records import Records
from benchmarks.tables import Column, Record, plot_points, shown, table

from .budget import BUDGETS

_HIGHEST = (
    *("peak_allocated_bytes", "peak_reserved_bytes", "pinned_bytes", "host_rss_bytes"),
    *("copied_out_bytes", "copied_in_bytes"),
)
_OF_ALL_RANKS = (
    *("label", "contender", "peak_reserved_bytes", "ratio"),
    *("step_ms_median", "step_ms_min", "step_ms_max", "host_ms_median"),
)


def slowest_of_ranks(turns: Iterable[Record], field: str = "step_ms") -> list[float]:
    """Return the time of each step, of all rounds: that of the rank on which it took longest."""
    rounds: dict[int, list[list[float]]] = {}
    for turn in turns:
        rounds.setdefault(turn["round"], []).append(turn[field])
    return [max(step) for times in rounds.values() for step in zip(*times, strict=True)]


def summarize(records: Records) -> list[Record]:
    """Make one record per contender and rank: medians, peaks, and ratios against no offload on the same ranks."""
    turns = records.of("turn")
    base = [turn for turn in turns if turn["contender"] == "none"]
    found = []
    for label in dict.fromkeys(turn["label"] for turn in turns):
        own = [turn for turn in turns if turn["label"] == label]
        times = _times(own, base)
        for rank in sorted({turn["rank"] for turn in own}):
            mine = [turn for turn in own if turn["rank"] == rank]
            parities = [r for r in records.of("parity") if r["label"] == label and r["rank"] == rank]
            found.append({"kind": "summary", **times, **_of_rank(mine), **_parity(mine, parities)})
    return found


def _times(own: Sequence[Record], base: Sequence[Record]) -> Record:
    steps = slowest_of_ranks(own)
    times: Record = {"step_ms_median": statistics.median(steps), "step_ms_min": min(steps), "step_ms_max": max(steps)}
    if base:
        times["ratio"] = times["step_ms_median"] / statistics.median(slowest_of_ranks(base))
    return times | {"host_ms_median": statistics.median(slowest_of_ranks(own, "host_ms"))}


def _of_rank(mine: Sequence[Record]) -> Record:
    """Return the largest of each peak and the rates of copies."""
    rates = {name: [turn[name] for turn in mine if turn[name]] for name in ("out_gbps", "in_gbps")}
    return {
        **{key: mine[0][key] for key in ("label", "contender", "modules", "rank")},
        **{name: max(turn[name] for turn in mine) for name in _HIGHEST},
        **{name: statistics.median(found) if found else None for name, found in rates.items()},
    }


def _parity(mine: Sequence[Record], parities: Iterable[Record]) -> Record:
    compared = [record for record in parities if not record["is_reference"]]
    return {
        "is_confirmed": all(turn["is_confirmed"] for turn in mine),
        "is_bitwise_equal": all(record["is_bitwise_equal"] for record in compared) if compared else None,
        "num_differing": max((record["num_differing"] for record in compared), default=None),
        "max_relative": max((record["max_relative"] for record in compared), default=None),
    }


def throughput(summaries: Sequence[Record], run: Record) -> list[Record]:
    """Make one record per contender: times, tokens/s of all ranks, the peak reserved of the worst rank, and both over
    full recomputation's where that took part."""
    worst: dict[str, Record] = {}
    for one in sorted(summaries, key=lambda one: one["peak_reserved_bytes"]):
        worst[one["label"]] = one
    base = worst.get("recompute")
    shape, found = run["shape"], []
    tokens = shape["seq"] * shape["mbs"] * shape["nmb"] * run["world_size"] // shape["pp"]  # of all data-parallel ranks
    for label in dict.fromkeys(summary["label"] for summary in summaries):
        one = worst[label]
        record = {"kind": "throughput", **{name: one[name] for name in _OF_ALL_RANKS if name in one}}
        record["tokens_per_s"] = tokens / one["step_ms_median"] * 1e3
        if base is not None:
            record["over_recompute"] = base["step_ms_median"] / one["step_ms_median"]
            record["reserved_over_recompute"] = one["peak_reserved_bytes"] / base["peak_reserved_bytes"]
        found.append(record)
    return found


# ---- tables ----

_CONTENDERS: dict[str, Column] = {
    "contender": "label",
    "median ms": ("step_ms_median", ",.1f"),
    "min": ("step_ms_min", ",.1f"),
    "max": ("step_ms_max", ",.1f"),
    "host ms": ("host_ms_median", ",.1f"),
    "over none": ("ratio", ",.4f"),
    "tokens/s": ("tokens_per_s", ",.0f"),
    "reserved MiB": ("peak_reserved_bytes", "MiB"),
    "tokens/s over recompute": ("over_recompute", ".4f"),
    "reserved over recompute": ("reserved_over_recompute", ".4f"),
}
_RANKS: dict[str, Column] = {
    "contender": "label",
    "rank": ("rank", ""),
    "allocated": ("peak_allocated_bytes", "MiB"),
    "reserved": ("peak_reserved_bytes", "MiB"),
    "pinned": ("pinned_bytes", "MiB"),
    "RSS": ("host_rss_bytes", "MiB"),
    "moved": "is_confirmed",
    "out": ("copied_out_bytes", "MiB"),
    "in": ("copied_in_bytes", "MiB"),
    "out GB/s": ("out_gbps", ".1f"),
    "in GB/s": ("in_gbps", ".1f"),
    "bitwise": "is_bitwise_equal",
    "differing": ("num_differing", ""),
    "max relative": ("max_relative", ".6f"),
}
_MACHINE: dict[str, Column] = {
    "what": lambda r: f"{r['kind']} {shown(r.get('copy_bytes'), 'MiB')}",
    "figures": lambda r: "  ".join(f"{k} {v:.3f}" for k, v in r.items() if k.endswith(("_gbps", "_ms", "us"))),
    "rank": "rank",
}


def tables(title: str, records: Records) -> list[Table]:
    """Return all tables for the end of a run."""
    by_rank = sorted(records.of("summary"), key=lambda s: s["rank"])
    return [
        table(f"{title}: steps of the slowest rank, memory of the worst", _CONTENDERS, records.of("throughput")),
        table("MiB: peaks of the turn, copies of one step; losses and gradients against no offload", _RANKS, by_rank),
        table(
            "budgets, on the worst rank: held is reserved, and what is outside of torch", BUDGETS, records.of("budget")
        ),
        table("the machine, same run", _MACHINE, records.of("link", "pinning", "group_cost")),
    ]


_MARKERS = {
    **{"none": "*", "ours": "o", "ours+recompute": "s", "incumbent": "^", "incumbent+recompute": "v"},
    **{"recompute": "X", "budget": "P"},
}
_IN_WORDS = {
    "none": "no offload",
    "ours": "this engine",
    "incumbent": "megatron-core's own offload",
    "recompute": "full recomputation",
    "budget": "this engine, within a budget of",
}


def plot_trade(found: Sequence[Record], file: Path) -> None:
    """Plot tokens/s over reserved memory, a point for each contender: further up and to the left is better."""

    def in_words(label: str) -> str:
        kind, _, what = label.partition(" ")
        text = what.replace(" @", "; ").replace("+", "; recomputing ").replace(",", ", ")
        return textwrap.fill(f"{_IN_WORDS[kind]}: {text}" if text else _IN_WORDS[kind], 44)

    sizes = ((in_words(one["label"]), one["peak_reserved_bytes"], one["tokens_per_s"]) for one in found)
    points = [(*size, {"marker": _MARKERS[one["contender"]]}) for size, one in zip(sizes, found, strict=True)]
    title = "circles: this engine; squares: this engine beside recomputation"
    names = {"xlabel": "peak reserved on the worst rank, GiB", "ylabel": "tokens a second, all ranks"}
    plot_points(file, points, title, **names)
