# SPDX-License-Identifier: Apache-2.0
"""What the records of a run amount to: ratios, falls of memory, throughput, tables and plots. Pure functions."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.tables import Column, Record, plot_points, shown, table

from .budget import BUDGETS

_HIGHEST = (
    *("peak_allocated_bytes", "peak_reserved_bytes", "pinned_bytes", "host_rss_bytes"),
    *("copied_out_bytes", "copied_in_bytes", "host_bytes_max"),
    *("prefetch_misses", "alloc_retries", "device_allocs"),
)


def slowest_of_ranks(turns: Iterable[Record], field: str = "step_ms") -> list[list[float]]:
    """Return, per round, the time of each step: that of the rank on which it took longest."""
    rounds: dict[int, list[list[float]]] = {}
    for turn in turns:
        rounds.setdefault(turn["round"], []).append(turn[field])
    return [[max(step) for step in zip(*rounds[number], strict=True)] for number in sorted(rounds)]


def summarize(records: Sequence[Record]) -> list[Record]:
    """Make one record per contender and rank: medians, falls and ratios against no offload on the same rank."""
    turns = [record for record in records if record["kind"] == "turn"]
    base = slowest_of_ranks(turn for turn in turns if turn["contender"] == "none")
    found = []
    for label in dict.fromkeys(turn["label"] for turn in turns):
        own = [turn for turn in turns if turn["label"] == label]
        times = _times(slowest_of_ranks(own), base)
        times["host_ms_median"] = statistics.median(sum(slowest_of_ranks(own, "host_ms"), []))
        for rank in sorted({turn["rank"] for turn in own}):
            found.append(_summary([turn for turn in own if turn["rank"] == rank], times, records))
    return found


def _times(rounds: list[list[float]], base: list[list[float]]) -> Record:
    steps = sum(rounds, [])
    times: Record = {"step_ms_median": statistics.median(steps), "step_ms_min": min(steps), "step_ms_max": max(steps)}
    if base:
        times["ratio"] = times["step_ms_median"] / statistics.median(sum(base, []))
        pairs = zip(rounds, base, strict=False)  # a contender that failed has fewer
        times["round_ratios"] = [statistics.median(own) / statistics.median(other) for own, other in pairs]
    return times


def _summary(mine: Sequence[Record], times: Record, records: Sequence[Record]) -> Record:
    rank = mine[0]["rank"]
    summary: Record = {"kind": "summary", **{key: mine[0][key] for key in ("label", "contender", "modules", "rank")}}
    summary |= times | {name: max(turn[name] for turn in mine) for name in _HIGHEST}
    summary["is_confirmed"] = all(turn["is_confirmed"] for turn in mine)
    for name in ("out_gbps", "in_gbps"):
        rates = [turn[name] for turn in mine if turn[name]]
        summary[name] = statistics.median(rates) if rates else None
    base = [t for t in records if t["kind"] == "turn" and t["contender"] == "none" and t["rank"] == rank]
    if base:
        summary |= _falls(summary, base)
    summary |= _against_link(summary, [r for r in records if r["kind"] == "link" and r["rank"] == rank])
    if "ratio" in summary and "link_out_ms" in summary:
        summary |= _against_bound(summary, is_pipeline=any(r["shape"]["pp"] > 1 for r in records if "shape" in r))
    return summary | _parity(summary["label"], rank, mine, records)


def _falls(summary: Record, base: Sequence[Record]) -> Record:
    """Compute how far the peaks fell: in bytes, and over the most on the host."""
    falls: Record = {}
    for name in ("allocated", "reserved"):
        fall = max(turn[f"peak_{name}_bytes"] for turn in base) - summary[f"peak_{name}_bytes"]
        nbytes = summary["host_bytes_max"]
        falls |= {f"fall_{name}_bytes": fall, f"fall_{name}_over_max": fall / nbytes if nbytes else None}
    return falls


def _against_link(summary: Record, links: Sequence[Record]) -> Record:
    """Compute the least time of the step's bytes on the link, and how near the copies came to plain ones."""
    if not links or not summary["copied_out_bytes"]:
        return {}
    best = {way: max(link[f"{way}_gbps"] for link in links) for way in ("out", "in", "both_out", "both_in")}
    found = {f"link_{way}_ms": summary[f"copied_{way}_bytes"] / best[way] / 1e6 for way in ("out", "in")}
    both = [summary[f"copied_{way}_bytes"] / best[f"both_{way}"] / 1e6 for way in ("out", "in")]
    pinned = summary["pinned_bytes"] / summary["host_bytes_max"] if summary["host_bytes_max"] else None
    shares = {f"{way}_share": (summary[f"{way}_gbps"] or 0) / best[way] for way in ("out", "in")}
    shares |= {f"{way}_share_of_both": (summary[f"{way}_gbps"] or 0) / best[f"both_{way}"] for way in ("out", "in")}
    return {**found, "link_both_ms": max(both), "pinned_share": pinned, **shares}


def _against_bound(summary: Record, *, is_pipeline: bool) -> Record:
    """Compare the step with the least that compute and link allow.

    In a pipeline copies go both ways at once. Without one, a microbatch's bytes go out in its forward and come back in
    its backward, which take turns.
    """
    in_turns_ms = summary["link_out_ms"] + summary["link_in_ms"]
    link_ms = summary["link_both_ms"] if is_pipeline else in_turns_ms
    compute_ms = summary["step_ms_median"] / summary["ratio"]
    bound_ms = max(link_ms, compute_ms)
    over_bound = summary["step_ms_median"] / bound_ms
    return {"is_link_bound": link_ms > compute_ms, "bound_ms": bound_ms, "over_bound": over_bound}


def _parity(label: str, rank: int, mine: Sequence[Record], records: Sequence[Record]) -> Record:
    own = (r for r in records if r["kind"] == "parity" and (r["label"], r["rank"]) == (label, rank))
    compared = [record for record in own if not record["is_reference"]]
    return {
        "is_bitwise_equal": all(record["is_bitwise_equal"] for record in compared) if compared else None,
        "num_differing": max((record["num_differing"] for record in compared), default=None),
        "max_relative": max((record["max_relative"] for record in compared), default=None),
        "repeats_itself": all(turn["between_steps"]["is_bitwise_equal"] for turn in mine),
    }


def throughput(summaries: Sequence[Record], records: Sequence[Record]) -> list[Record]:
    """Make one record per contender: tokens/s of all ranks, the peak reserved of the worst rank, and both over full
    recomputation's where that took part."""
    run = next((record for record in records if record["kind"] == "run"), None)
    found = []
    for label in dict.fromkeys(summary["label"] for summary in summaries if run):
        own = [summary for summary in summaries if summary["label"] == label]
        one: Record = {"kind": "throughput", "label": label, "contender": own[0]["contender"]}
        one["tokens_per_s"] = tokens_of_step(run or {}) / own[0]["step_ms_median"] * 1e3
        one["peak_reserved_bytes"] = max(summary["peak_reserved_bytes"] for summary in own)
        found.append(one)
    base = next((one for one in found if one["contender"] == "recompute"), None)
    for one in found:
        if base is None:
            break
        one["over_recompute"] = one["tokens_per_s"] / base["tokens_per_s"]
        one["reserved_over_recompute"] = one["peak_reserved_bytes"] / base["peak_reserved_bytes"]
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
    "link out ms": ("link_out_ms", ",.1f"),
    "link in ms": ("link_in_ms", ",.1f"),
    "over bound": ("over_bound", ".4f"),
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


def tables(title: str, records: Sequence[Record]) -> list[Table]:
    """Return all tables for the end of a run."""

    def of(*kinds: str) -> list[Record]:
        return [record for record in records if record["kind"] in kinds]

    summaries = of("summary")
    by_rank = sorted(summaries, key=lambda s: s["rank"])
    return [
        table(f"{title}: step time, slowest rank", _TIMES, {s["label"]: s for s in reversed(summaries)}.values()),
        table("memory, MiB (peaks of the turn)", _MEMORY, by_rank),
        table("copies of one step, and losses and gradients against no offload", _MOVES, by_rank),
        table("throughput, all ranks; memory of the worst rank", _THROUGHPUT, of("throughput")),
        table("budgets, on the worst rank: held is reserved, and what is outside of torch", BUDGETS, of("budget")),
        table("the machine, same run", _MACHINE, of("link", "host_read", "pinning", "group_cost")),
    ]


# ---- plots ----

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


def _in_words(label: str) -> str:
    """Label an entry for readers who have not seen the command line."""
    kind, _, what = label.partition(" ")
    name = _IN_WORDS.get(kind, kind)
    text = what.replace(" @", "; ").replace("+", "; recomputing ").replace(",", ", ")
    return f"{name}: {text}" if text else name


def plot_trade(found: Sequence[Record], file: Path) -> None:
    """Plot tokens/s over reserved memory, a point for each contender: further up and to the left is better."""
    points = [
        (
            *(textwrap.fill(_in_words(one["label"]), 44), one["peak_reserved_bytes"], one["tokens_per_s"]),
            {"marker": _MARKERS[one["contender"]]},
        )
        for one in found
    ]
    title = "circles: this engine; squares: this engine beside recomputation"
    names = {"xlabel": "peak reserved on the worst rank, GiB", "ylabel": "tokens a second, all ranks"}
    plot_points(file, points, title, **names)
