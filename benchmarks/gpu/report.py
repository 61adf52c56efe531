# SPDX-License-Identifier: Apache-2.0
"""What the records of a run amount to: ratios, falls of memory, tables and the plot. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group

from benchmarks.plots import picture
from benchmarks.tables import Rows, mib, number

from .budget import budget_table
from .measure import MemoryTimeline
from .throughput import in_words, throughput, throughput_table

Record = dict[str, Any]

_MEMORY = ("peak_allocated_bytes", "peak_reserved_bytes", "pinned_bytes", "host_rss_bytes")
_MOVES = (
    *("copied_out_bytes", "copied_in_bytes", "host_bytes_max", "host_bytes_at_peak"),
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
    labels = list(dict.fromkeys(turn["label"] for turn in turns))
    base = slowest_of_ranks(turn for turn in turns if turn["contender"] == "none")
    found = []
    for label in labels:
        own = [turn for turn in turns if turn["label"] == label]
        times = _times(slowest_of_ranks(own), base)
        times["host_ms_median"] = statistics.median(_flat(slowest_of_ranks(own, "host_ms")))
        for rank in sorted({turn["rank"] for turn in own}):
            found.append(_summary(own, rank, times, records))
    return found


def _times(rounds: list[list[float]], base: list[list[float]]) -> Record:
    steps = _flat(rounds)
    times: Record = {"step_ms_median": statistics.median(steps), "step_ms_min": min(steps), "step_ms_max": max(steps)}
    if base:
        times["ratio"] = times["step_ms_median"] / statistics.median(_flat(base))
        pairs = zip(rounds, base, strict=False)  # a contender that failed has fewer
        times["round_ratios"] = [statistics.median(own) / statistics.median(other) for own, other in pairs]
    return times


def _summary(own: Sequence[Record], rank: int, times: Record, records: Sequence[Record]) -> Record:
    mine = [turn for turn in own if turn["rank"] == rank]
    summary: Record = {"kind": "summary", **{key: mine[0][key] for key in ("label", "contender", "modules", "rank")}}
    summary.update(times)
    summary.update({name: max(turn[name] for turn in mine) for name in (*_MEMORY, *_MOVES)})
    summary["is_confirmed"] = all(turn["is_confirmed"] for turn in mine)
    for name in ("out_gbps", "in_gbps"):
        rates = [turn[name] for turn in mine if turn[name]]
        summary[name] = statistics.median(rates) if rates else None
    base = [t for t in records if t["kind"] == "turn" and t["contender"] == "none" and t["rank"] == rank]
    if base:
        summary.update(_falls(summary, mine, base))
    summary.update(_against_link(summary, [r for r in records if r["kind"] == "link" and r["rank"] == rank]))
    if "ratio" in summary and "link_out_ms" in summary:
        summary.update(_against_bound(summary, is_pipeline=any(r["shape"]["pp"] > 1 for r in records if "shape" in r)))
    summary.update(_parity(summary["label"], rank, mine, records))
    return summary


def _falls(summary: Record, mine: Sequence[Record], base: Sequence[Record]) -> Record:
    """Compute how far the peaks fell: in bytes, over the most on the host, and over the bytes at the peak.

    What was allocated at the peak is that of the counted step, in the turn with the least fall: the peak of another
    step may lie where more, or less, has left the device.
    """
    falls: Record = {}
    for name in ("allocated", "reserved"):
        fall = _highest(base, f"peak_{name}_bytes") - summary[f"peak_{name}_bytes"]
        falls[f"fall_{name}_bytes"] = fall
        for on_host in ("max", "at_peak"):
            nbytes = summary[f"host_bytes_{on_host}"]
            falls[f"fall_{name}_over_{on_host}"] = fall / nbytes if nbytes else None
    counted = _highest(base, "peak_allocated_bytes_counted")
    shares = [
        (counted - turn["peak_allocated_bytes_counted"]) / turn["host_bytes_at_peak"]
        for turn in mine
        if turn["host_bytes_at_peak"]
    ]
    falls["fall_allocated_over_at_peak"] = min(shares, default=None)
    return falls


def _highest(turns: Sequence[Record], name: str) -> int:
    return max(int(turn[name]) for turn in turns)


def _against_link(summary: Record, links: Sequence[Record]) -> Record:
    """Compute the least time of the step's bytes on the link, and how near the copies came to plain ones."""
    if not links or not summary["copied_out_bytes"]:
        return {}
    best = {way: max(link[f"{way}_gbps"] for link in links) for way in ("out", "in", "both_out", "both_in")}
    out_ms, in_ms = (summary[f"copied_{way}_bytes"] / best[way] / 1e6 for way in ("out", "in"))
    both_ms = max(summary[f"copied_{way}_bytes"] / best[f"both_{way}"] / 1e6 for way in ("out", "in"))
    shares = {f"{way}_share": (summary[f"{way}_gbps"] or 0) / best[way] for way in ("out", "in")}
    both = {f"{way}_share_of_both": (summary[f"{way}_gbps"] or 0) / best[f"both_{way}"] for way in ("out", "in")}
    return {
        "link_out_ms": out_ms,
        "link_in_ms": in_ms,
        "link_both_ms": both_ms,
        "pinned_share": summary["pinned_bytes"] / summary["host_bytes_max"] if summary["host_bytes_max"] else None,
        **shares,
        **both,
    }


def _against_bound(summary: Record, *, is_pipeline: bool) -> Record:
    """Compare the step with the least that compute and link allow.

    In a pipeline copies go both ways at once. Without one, a microbatch's bytes go out in its forward and come back in
    its backward, which take turns.
    """
    in_turns_ms = summary["link_out_ms"] + summary["link_in_ms"]
    link_ms = summary["link_both_ms"] if is_pipeline else in_turns_ms
    compute_ms = summary["step_ms_median"] / summary["ratio"]
    return {
        "is_link_bound": link_ms > compute_ms,
        "bound_ms": max(link_ms, compute_ms),
        "over_bound": summary["step_ms_median"] / max(link_ms, compute_ms),
    }


def _parity(label: str, rank: int, mine: Sequence[Record], records: Sequence[Record]) -> Record:
    compared = [
        record
        for record in records
        if record["kind"] == "parity" and record["label"] == label and record["rank"] == rank
        if not record["is_reference"]
    ]
    between = [turn["between_steps"] for turn in mine]
    return {
        "is_bitwise_equal": all(record["is_bitwise_equal"] for record in compared) if compared else None,
        "num_differing": max((record["num_differing"] for record in compared), default=None),
        "max_relative": max((record["max_relative"] for record in compared), default=None),
        "repeats_itself": all(record["is_bitwise_equal"] for record in between),
    }


def _flat(rounds: Iterable[Iterable[float]]) -> list[float]:
    return [value for one in rounds for value in one]


# ---- tables ----


def tables(title: str, summaries: Sequence[Record], records: Sequence[Record]) -> Group:
    """Return all tables for the end of a run."""
    parts = [_time_table(title, summaries), _memory_table(summaries), _moves_table(summaries)]
    parts += [throughput_table(found)] if (found := throughput(summaries, records)) else []
    parts += [budget_table(within)] if (within := [r for r in records if r["kind"] == "budget"]) else []
    return Group(*(rows.for_terminal() for rows in (*parts, _machine_table(records))))


def _time_table(title: str, summaries: Sequence[Record]) -> Rows:
    head = ("contender", "ratio by round", "median ms", "min", "max", "host ms", "ratio")
    rows = []
    for s in {s["label"]: s for s in reversed(summaries)}.values():
        times = (f"{s[name]:,.1f}" for name in ("step_ms_median", "step_ms_min", "step_ms_max", "host_ms_median"))
        rounds = " ".join(f"{ratio:.4f}" for ratio in s.get("round_ratios", ()))
        rows.append((s["label"], rounds, *times, number(s.get("ratio"), 4)))
    return Rows(f"{title}: step time, slowest rank", head, rows, num_words=2)


def _memory_table(summaries: Sequence[Record]) -> Rows:
    head = (
        *("contender", "rank", "allocated", "reserved", "fall alloc.", "fall res.", "host max", "host at peak"),
        *("R at peak", "R of max", "res. at peak", "res. of max", "pinned", "RSS", "retries"),
    )
    rows = [
        (
            *(s["label"], str(s["rank"])),
            *(mib(s.get(name)) for name in ("peak_allocated_bytes", "peak_reserved_bytes")),
            *(mib(s.get(name)) for name in ("fall_allocated_bytes", "fall_reserved_bytes")),
            *(mib(s[name]) for name in ("host_bytes_max", "host_bytes_at_peak")),
            *(number(s.get(f"fall_allocated_over_{of}"), 4) for of in ("at_peak", "max")),
            *(number(s.get(f"fall_reserved_over_{of}"), 4) for of in ("at_peak", "max")),
            *(mib(s.get(name)) for name in ("pinned_bytes", "host_rss_bytes")),
            str(s["alloc_retries"]),
        )
        for s in sorted(summaries, key=lambda s: s["rank"])
    ]
    return Rows("memory, MiB (peaks of the turn)", head, rows)


def _moves_table(summaries: Sequence[Record]) -> Rows:
    head = (
        *("contender", "rank", "moved", "out MiB", "in MiB", "misses", "out GB/s", "in GB/s"),
        *("link out ms", "link in ms", "over bound", "bitwise", "differing", "max relative", "repeats itself"),
    )
    rows = [
        (
            *(s["label"], str(s["rank"]), _words(s["is_confirmed"])),
            *(mib(s[name]) for name in ("copied_out_bytes", "copied_in_bytes")),
            str(s["prefetch_misses"]),
            *(number(s.get(name), 1) for name in ("out_gbps", "in_gbps", "link_out_ms", "link_in_ms")),
            number(s.get("over_bound"), 4),
            *(_words(s[name]) for name in ("is_bitwise_equal", "num_differing")),
            number(s["max_relative"], 6),
            _words(s["repeats_itself"]),
        )
        for s in sorted(summaries, key=lambda s: s["rank"])
    ]
    return Rows("copies of one step, and losses and gradients against no offload", head, rows)


def _machine_table(records: Sequence[Record]) -> Rows:
    rows = []
    for record in records:
        if record["kind"] in ("link", "host_read", "pinning", "group_cost", "host"):
            figures = {k: v for k, v in record.items() if k.endswith(("_gbps", "_ms", "us"))}
            what = f"{record['kind']} {mib(record['copy_bytes'])} MiB" if "copy_bytes" in record else record["kind"]
            shown = "  ".join(f"{name} {value:.3f}" for name, value in figures.items())
            rows.append((what, shown, str(record.get("rank", ""))))
    return Rows("the machine, same run", ("what", "figures", "rank"), rows, num_words=2)


def _words(value: Any) -> str:
    return "" if value is None else {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


# ---- plot ----


def plot_memory(timelines: Sequence[MemoryTimeline], file: Path) -> None:
    """Plot device memory over one step of each contender: allocated as a line, reserved dashed."""
    with picture(file, figsize=(10, 5)) as (_, axes):
        for timeline in timelines:
            allocated, reserved = (
                [nbytes / (1 << 30) for nbytes in series]
                for series in (timeline.allocated_bytes, timeline.reserved_bytes)
            )
            label = in_words(timeline.label)
            (line,) = axes.plot(timeline.milliseconds, allocated, label=f"{label}: allocated")
            axes.plot(timeline.milliseconds, reserved, "--", color=line.get_color(), label=f"{label}: reserved")
        axes.set(xlabel="ms since the step began (host)", ylabel="GiB on the device, rank 0", ylim=(0, None))
        axes.legend()
        axes.grid(alpha=0.3)
