# SPDX-License-Identifier: Apache-2.0
"""What the records of a run amount to: medians, ratios, bounds, tables and the plot of them. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.plots import picture
from benchmarks.tables import Rows, mib

from .settings import CHECKPOINTED, CONTENDERS, OURS, RECORDED_PARTS

Record = dict[str, Any]

_MEMORY = ("peak_allocated_bytes", "peak_reserved_bytes", "host_rss_bytes")
_AT_LONGEST = ("reserved MiB there", "pinned MiB there")


def summarize(records: Sequence[Record]) -> list[Record]:
    """Make one record per contender: medians over all turns, the largest peaks, ratios over no offload."""
    turns = [record for record in records if record["kind"] == "turn"]
    labels = list(dict.fromkeys(turn["label"] for turn in turns))
    base = _steps(turn for turn in turns if turn["label"] == "none")
    return [_summary([turn for turn in turns if turn["label"] == label], base) for label in labels]


def _summary(own: Sequence[Record], base: Sequence[float]) -> Record:
    steps = _steps(own)
    measured = [turn for turn in own if turn["step_ms"]]
    parities = [turn["parity"] for turn in own if turn["parity"] and not turn["parity"]["is_reference"]]
    summary: Record = {
        "kind": "summary",
        "label": own[0]["label"],
        "num_steps": len(steps),
        "step_ms_median": statistics.median(steps) if steps else None,
        "step_ms_min": min(steps, default=None),
        "step_ms_max": max(steps, default=None),
        "ratio": statistics.median(steps) / statistics.median(base) if steps and base else None,
        "forward_ms": statistics.median(turn["forward_ms"] for turn in measured) if measured else None,
        "is_bitwise_equal": all(parity["is_bitwise_equal"] for parity in parities) if parities else None,
        "num_differing": max((parity["num_differing"] for parity in parities), default=None),
        "pinned_bytes": max((_pinned(turn) for turn in measured), default=None),
        "failure": next((turn["failure"] for turn in own if turn["failure"]), None),
    }
    summary |= {name: max((turn[name] for turn in measured), default=None) for name in _MEMORY}
    summary["engine"] = measured[-1].get("engine", {}) if measured else {}
    return summary


def _steps(turns: Iterable[Record]) -> list[float]:
    return [step for turn in turns for step in turn["step_ms"]]


def _pinned(turn: Record) -> int:
    return int(turn["torch_pinned_bytes"]) + int(turn.get("engine", {}).get("host_bytes", 0))


def tables(title: str, records: Sequence[Record]) -> list[Rows]:
    """Make all tables of these records; tables without rows are left out."""
    summaries = [record for record in records if record["kind"] == "summary"]
    found = [
        _main_table(title, summaries),
        _engine_table(summaries),
        _bound_table(records, summaries),
        _longest_table(title, [record for record in records if record["kind"] == "longest"]),
        _recording_table(title, [record for record in records if record["kind"] == "recording"]),
        _left_out(records),
    ]
    return [rows for rows in found if rows.rows]


def _main_table(title: str, summaries: Sequence[Record]) -> Rows:
    head = ("contender", "step ms (min to max)", "over none", "allocated", "reserved", "pinned", "RSS", "bitwise")
    rows = []
    for s in summaries:
        times = (
            f"{s['step_ms_median']:.1f} ({s['step_ms_min']:.1f} to {s['step_ms_max']:.1f})" if s["num_steps"] else ""
        )
        memory = (mib(s[name]) for name in ("peak_allocated_bytes", "peak_reserved_bytes", "pinned_bytes"))
        parity = {None: "", True: "yes", False: f"{s['num_differing']} differ"}[s["is_bitwise_equal"]]
        note = f" ({s['failure']}; {s['num_steps']} timed steps)" if s["failure"] else ""
        ratio = "" if s["ratio"] is None else f"{s['ratio']:.4f}"
        rows.append((_name(s["label"]) + note, times, ratio, *memory, mib(s["host_rss_bytes"]), parity))
    return Rows(f"{title}; memory in MiB, peaks of the timed steps", head, rows)


def _engine_table(summaries: Sequence[Record]) -> Rows:
    head = ("what the engine counted in the last step", "out MiB", "in MiB", "on host", "kept", "misses", "groups")
    names = ("copied_out_bytes", "copied_in_bytes", "peak_host_bytes", "kept_bytes")
    rows = [
        (
            _name(s["label"]),
            *(mib(s["engine"][name]) for name in names),
            str(s["engine"]["prefetch_misses"]),
            f"{s['engine']['num_offloaded_groups']} of {s['engine']['num_groups']}",
        )
        for s in summaries
        if s["engine"]
    ]
    return Rows("copies", head, rows)


def _bound_table(records: Sequence[Record], summaries: Sequence[Record]) -> Rows:
    head = ("what the link allows", "saved MiB", "copy-out ms", "copy-in ms", "compute ms", "bound ms", "best of ours")
    rows = []
    for bound in (record for record in records if record["kind"] == "bound"):
        is_checkpointed = bound["label"] in CHECKPOINTED
        alike = [
            s["step_ms_median"]
            for s in summaries
            if s["label"] in OURS and (s["label"] in CHECKPOINTED) == is_checkpointed and s["step_ms_median"]
        ]
        rows.append(
            (
                "with checkpointing" if is_checkpointed else "without checkpointing",
                mib(bound["saved_bytes"]),
                *(f"{bound[name]:.1f}" for name in ("out_ms", "in_ms", "compute_ms", "step_ms")),
                f"{min(alike):.1f}" if alike else "",
            )
        )
    return Rows("the same model, by arithmetic from the saved bytes, the link and the run without offload", head, rows)


def _longest_table(title: str, found: Sequence[Record]) -> Rows:
    head = ("contender", "longest", "shortest that failed", "why", "predicted", *_AT_LONGEST, "trials", "s")
    rows = [
        (
            _name(one["label"]),
            _tokens(one),
            f"{one['failed']:,}" if one["failed"] else "",
            one["reason"] or "",
            f"{one['guess']:,}" if one["guess"] else "",
            mib(one["peak_reserved_bytes"]),
            mib(one["host_bytes"]),
            str(one["num_trials"]),
            f"{one['seconds']:.0f}",
        )
        for one in sorted(found, key=lambda one: -one["trained"])
    ]
    return Rows(f"{title}; the longest sequence that trains, tokens", head, rows)


def _recording_table(title: str, found: Sequence[Record]) -> Rows:
    head = ("tokens", "step", "ms", "added ms", "over no recording")
    rows = [
        (
            f"{one['seq']:,}",
            RECORDED_PARTS[one["part"]],
            f"{one['step_ms_median']:.2f}",
            f"{one['added_ms']:+.2f}",
            f"{one['ratio']:.4f}",
        )
        for one in found
    ]
    return Rows(f"{title}; {CONTENDERS['layers']} while steps are recorded, medians", head, rows)


def _tokens(found: Record) -> str:
    """Format a length; it is proven where the next one, by one unit, was seen to fail."""
    if found["is_final"] and found["trained"]:
        return f"{found['trained']:,}, proven" if found["failed"] else f"{found['trained']:,}, no longer one was tried"
    if found["is_final"]:
        return "none"
    return f"at least {found['trained']:,}" if found["trained"] else "not known"


def _left_out(records: Sequence[Record]) -> Rows:
    rows = [(_name(r["label"]), r["reason"]) for r in records if r["kind"] == "missing"]
    return Rows("not here", ("contender", "why"), rows)


def _name(label: str) -> str:
    return f"{label}: {CONTENDERS[label]}"


def plot_trade(records: Sequence[Record], file: Path) -> None:
    """Plot step time over peak reserved memory, a point for each measured contender: lower left is better."""
    from matplotlib import colormaps

    with picture(file, figsize=(11, 5)) as (figure, axes):
        measured = [
            record for record in records if record["kind"] == "summary" and record["step_ms_median"] is not None
        ]
        for index, record in enumerate(sorted(measured, key=lambda record: record["label"] not in OURS)):
            gib = (record["peak_reserved_bytes"] or 0) / (1 << 30)  # without a GPU no allocator has a peak
            axes.scatter(
                gib,
                record["step_ms_median"],
                s=90,
                color=colormaps["tab20"](index),
                marker="s" if record["label"] in CHECKPOINTED else "o",
                edgecolors="black" if record["label"] in OURS else "none",
                label=CONTENDERS[record["label"]],
                zorder=2,
            )
        axes.set(xlabel="peak reserved on the device, GiB", ylabel="ms a step")
        axes.set_title("squares: with checkpointing; black edges: this project", loc="left", fontsize=9)
        axes.grid(alpha=0.3)
        figure.legend(loc="outside right upper", fontsize=8, frameon=False)


def plot_longest(records: Sequence[Record], file: Path) -> None:
    """Plot a bar for each contender that trained any length, the longest on top."""
    found = [record for record in records if record["kind"] == "longest" and record["trained"]]
    found.sort(key=lambda record: record["trained"])
    with picture(file, figsize=(11, 1 + 0.35 * len(found))) as (_, axes):
        bars = axes.barh(
            [CONTENDERS[record["label"]] for record in found],
            [record["trained"] for record in found],
            color=["tab:blue" if record["label"] in OURS else "tab:gray" for record in found],
            hatch=[None if record["is_final"] else "///" for record in found],
            edgecolor="white",
        )
        axes.bar_label(bars, labels=[_tokens(record) for record in found], padding=3, fontsize=8)
        axes.set(xlabel="tokens of the longest sequence that trains")
        axes.margins(x=0.15)
        axes.tick_params(axis="y", labelsize=8)
        axes.set_title("blue: this project; hatched: not searched to the end", loc="left", fontsize=9)
