# SPDX-License-Identifier: Apache-2.0
"""What the records of a run amount to: ratios, falls of memory, throughput, tables and the plot. Pure functions."""

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
    *("copied_out_bytes", "copied_in_bytes", "host_bytes_max", "prefetch_misses", "alloc_retries", "device_allocs"),
)


def slowest_of_ranks(turns: Iterable[Record], field: str = "step_ms") -> list[list[float]]:
    """Return, per round, the time of each step: that of the rank on which it took longest."""
    rounds: dict[int, list[list[float]]] = {}
    for turn in turns:
        rounds.setdefault(turn["round"], []).append(turn[field])
    return [[max(step) for step in zip(*rounds[number], strict=True)] for number in sorted(rounds)]


def summarize(records: Records) -> list[Record]:
    """Make one record per contender and rank: medians, falls and ratios against no offload on the same rank."""
    turns = records.of("turn")
    base = [turn for turn in turns if turn["contender"] == "none"]
    found = []
    for label in dict.fromkeys(turn["label"] for turn in turns):
        own = [turn for turn in turns if turn["label"] == label]
        times = _times(slowest_of_ranks(own), slowest_of_ranks(base))
        times["host_ms_median"] = statistics.median(sum(slowest_of_ranks(own, "host_ms"), []))
        for rank in sorted({turn["rank"] for turn in own}):
            mine, parities, unloaded = (
                [record for record in some if record["rank"] == rank]
                for some in (own, (r for r in records.of("parity") if r["label"] == label), base)
            )
            found.append(times | _memory(mine, unloaded) | _parity(mine, parities))
    return found


def _times(rounds: list[list[float]], base: list[list[float]]) -> Record:
    steps = sum(rounds, [])
    times: Record = {"step_ms_median": statistics.median(steps), "step_ms_min": min(steps), "step_ms_max": max(steps)}
    if base:
        times["ratio"] = times["step_ms_median"] / statistics.median(sum(base, []))
        pairs = zip(rounds, base, strict=False)  # a contender that failed has fewer
        times["round_ratios"] = [statistics.median(own) / statistics.median(other) for own, other in pairs]
    return times


def _memory(mine: Sequence[Record], base: Sequence[Record]) -> Record:
    """Return the largest of each peak, how far those of the device fell, and the rates of copies."""
    summary: Record = {"kind": "summary", **{key: mine[0][key] for key in ("label", "contender", "modules", "rank")}}
    summary |= {name: max(turn[name] for turn in mine) for name in _HIGHEST}
    nbytes = summary["host_bytes_max"]
    for name in ("allocated", "reserved") if base else ():
        fall = max(turn[f"peak_{name}_bytes"] for turn in base) - summary[f"peak_{name}_bytes"]
        summary |= {f"fall_{name}_bytes": fall, f"fall_{name}_over_max": fall / nbytes if nbytes else None}
    for name in ("out_gbps", "in_gbps"):
        rates = [turn[name] for turn in mine if turn[name]]
        summary[name] = statistics.median(rates) if rates else None
    return summary


def _parity(mine: Sequence[Record], parities: Iterable[Record]) -> Record:
    compared = [record for record in parities if not record["is_reference"]]
    return {
        "is_confirmed": all(turn["is_confirmed"] for turn in mine),
        "is_bitwise_equal": all(record["is_bitwise_equal"] for record in compared) if compared else None,
        "num_differing": max((record["num_differing"] for record in compared), default=None),
        "max_relative": max((record["max_relative"] for record in compared), default=None),
        "repeats_itself": all(turn["between_steps"]["is_bitwise_equal"] for turn in mine),
    }


def throughput(summaries: Sequence[Record], run: Record) -> list[Record]:
    """Make one record per contender: tokens/s of all ranks, the peak reserved of the worst rank, and both over full
    recomputation's where that took part."""
    worst: dict[str, Record] = {}
    for one in sorted(summaries, key=lambda one: one["peak_reserved_bytes"]):
        worst[one["label"]] = one
    base = worst.get("recompute")
    found = []
    for label in dict.fromkeys(summary["label"] for summary in summaries):
        one, ms, nbytes = worst[label], worst[label]["step_ms_median"], worst[label]["peak_reserved_bytes"]
        record = {"kind": "throughput", "label": label, "contender": one["contender"], "peak_reserved_bytes": nbytes}
        record["tokens_per_s"] = tokens_of_step(run) / ms * 1e3
        if base is not None:
            record["over_recompute"] = base["step_ms_median"] / ms
            record["reserved_over_recompute"] = nbytes / base["peak_reserved_bytes"]
        found.append(record)
    return found


def tokens_of_step(run: Record) -> int:
    """Return the tokens of one step, of all data-parallel ranks."""
    shape = run["shape"]
    return int(shape["seq"] * shape["mbs"] * shape["nmb"] * run["world_size"] // shape["pp"])


# ---- tables ----

_BY_RANK: dict[str, Column] = {"contender": "label", "rank": ("rank", "")}
_TIMES: dict[str, Column] = {
    "contender": "label",
    "ratio by round": lambda s: " ".join(f"{ratio:.4f}" for ratio in s.get("round_ratios", ())),
    "median ms": ("step_ms_median", ",.1f"),
    "min": ("step_ms_min", ",.1f"),
    "max": ("step_ms_max", ",.1f"),
    "host ms": ("host_ms_median", ",.1f"),
    "ratio": ("ratio", ",.4f"),
}
_MEMORY: dict[str, Column] = {
    **_BY_RANK,
    "allocated": ("peak_allocated_bytes", "MiB"),
    "reserved": ("peak_reserved_bytes", "MiB"),
    "fall alloc.": ("fall_allocated_bytes", "MiB"),
    "fall res.": ("fall_reserved_bytes", "MiB"),
    "host max": ("host_bytes_max", "MiB"),
    "alloc. over it": ("fall_allocated_over_max", ".4f"),
    "res. over it": ("fall_reserved_over_max", ".4f"),
    "pinned": ("pinned_bytes", "MiB"),
    "RSS": ("host_rss_bytes", "MiB"),
    "retries": ("alloc_retries", ""),
}
_MOVES: dict[str, Column] = {
    **_BY_RANK,
    "moved": "is_confirmed",
    "out MiB": ("copied_out_bytes", "MiB"),
    "in MiB": ("copied_in_bytes", "MiB"),
    "misses": ("prefetch_misses", ""),
    "out GB/s": ("out_gbps", ".1f"),
    "in GB/s": ("in_gbps", ".1f"),
    "bitwise": "is_bitwise_equal",
    "differing": ("num_differing", ""),
    "max relative": ("max_relative", ".6f"),
    "repeats itself": "repeats_itself",
}
_THROUGHPUT: dict[str, Column] = {
    "contender": "label",
    "tokens/s": ("tokens_per_s", ",.0f"),
    "reserved MiB": ("peak_reserved_bytes", "MiB"),
    "tokens/s over recompute": ("over_recompute", ".4f"),
    "reserved over recompute": ("reserved_over_recompute", ".4f"),
}
_MACHINE: dict[str, Column] = {
    "what": lambda r: f"{r['kind']} {shown(r.get('copy_bytes'), 'MiB')}",
    "figures": lambda r: "  ".join(f"{k} {v:.3f}" for k, v in r.items() if k.endswith(("_gbps", "_ms", "us"))),
    "rank": "rank",
}


def tables(title: str, records: Records) -> list[Table]:
    """Return all tables for the end of a run."""
    of, summaries = records.of, records.of("summary")
    by_rank = sorted(summaries, key=lambda s: s["rank"])
    return [
        table(f"{title}: step time, slowest rank", _TIMES, {s["label"]: s for s in reversed(summaries)}.values()),
        table("memory, MiB (peaks of the turn)", _MEMORY, by_rank),
        table("copies of one step, and losses and gradients against no offload", _MOVES, by_rank),
        table("throughput, all ranks; memory of the worst rank", _THROUGHPUT, of("throughput")),
        table("budgets, on the worst rank: held is reserved, and what is outside of torch", BUDGETS, of("budget")),
        table("the machine, same run", _MACHINE, of("link", "pinning", "group_cost")),
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
