# SPDX-License-Identifier: Apache-2.0
"""What the records of a run amount to: medians, ratios, tables and the plot of them. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.records import Records
from benchmarks.tables import Column, Record, plot_points, shown, table

from .settings import CHECKPOINTED, CONTENDERS, OURS

_MEMORY = ("peak_allocated_bytes", "peak_reserved_bytes", "host_rss_bytes")


def summarize(records: Records) -> list[Record]:
    """Make one record per contender: medians over all turns, the largest peaks, ratios over no offload."""
    turns = records.of("turn")
    base = _steps(turn for turn in turns if turn["label"] == "none")
    labels = dict.fromkeys(turn["label"] for turn in turns)
    return [_summary([turn for turn in turns if turn["label"] == label], base) for label in labels]


def _summary(own: Sequence[Record], base: Sequence[float]) -> Record:
    steps = _steps(own)
    measured = [turn for turn in own if turn["step_ms"]]
    parities = [turn["parity"] for turn in own if turn["parity"] and not turn["parity"]["is_reference"]]
    pinned = [turn["torch_pinned_bytes"] + turn["engine"].get("host_bytes", 0) for turn in measured]
    return {
        "kind": "summary",
        "label": own[0]["label"],
        "num_steps": len(steps),
        "step_ms_median": statistics.median(steps) if steps else None,
        "step_ms_min": min(steps, default=None),
        "step_ms_max": max(steps, default=None),
        "ratio": statistics.median(steps) / statistics.median(base) if steps and base else None,
        "is_bitwise_equal": all(parity["is_bitwise_equal"] for parity in parities) if parities else None,
        "num_differing": max((parity["num_differing"] for parity in parities), default=None),
        "pinned_bytes": max(pinned, default=None),
        "failure": next((turn["failure"] for turn in own if turn["failure"]), None),
        **{name: max((turn[name] for turn in measured), default=None) for name in _MEMORY},
        "engine": measured[-1]["engine"] if measured else {},
    }


def _steps(turns: Iterable[Record]) -> list[float]:
    return [step for turn in turns for step in turn["step_ms"]]


# ---- tables ----


def _name(record: Record) -> str:
    failure = record.get("failure")
    note = f" ({failure}; {record['num_steps']} timed steps)" if failure else ""
    return f"{record['label']}: {CONTENDERS[record['label']]}{note}"


def _tokens(found: Record) -> str:
    """Format a length; it is proven where the next one, by one unit, was seen to fail."""
    if found["is_final"] and found["trained"]:
        return f"{found['trained']:,}, proven"
    if found["is_final"]:
        return "none"
    return f"at least {found['trained']:,}" if found["trained"] else "not known"


_STEPS: dict[str, Column] = {
    "contender": _name,
    "step ms": ("step_ms_median", ",.1f"),
    "min": ("step_ms_min", ",.1f"),
    "max": ("step_ms_max", ",.1f"),
    "over none": ("ratio", ".4f"),
    "allocated": ("peak_allocated_bytes", "MiB"),
    "reserved": ("peak_reserved_bytes", "MiB"),
    "pinned": ("pinned_bytes", "MiB"),
    "RSS": ("host_rss_bytes", "MiB"),
    "bitwise": lambda s: f"{s['num_differing']} differ" if s["num_differing"] else shown(s["is_bitwise_equal"]),
}
_LONGEST: dict[str, Column] = {
    "contender": _name,
    "longest": _tokens,
    "shortest that failed": ("failed", ","),
    "why": "reason",
    "predicted": ("guess", ","),
    "reserved MiB there": ("peak_reserved_bytes", "MiB"),
    "pinned MiB there": ("host_bytes", "MiB"),
    "trials": ("num_trials", ""),
    "s": ("seconds", ".0f"),
}
_RECORDING: dict[str, Column] = {
    "tokens": ("seq", ","),
    "step": "part",
    "ms": ("step_ms_median", ".2f"),
    "added ms": ("added_ms", "+.2f"),
    "over no recording": ("ratio", ".4f"),
}


def tables(title: str, records: Records, as_markdown: bool) -> list[Table]:
    """Make all tables of these records."""
    longest = sorted(records.of("longest"), key=lambda one: -one["trained"])
    found: list[tuple[str, dict[str, Column], list[Record]]] = [
        (f"{title}; memory in MiB, peaks of the timed steps", _STEPS, records.of("summary")),
        (f"{title}; the longest sequence that trains, tokens", _LONGEST, longest),
        (f"{title}; {CONTENDERS['layers']} while steps are recorded, medians", _RECORDING, records.of("recording")),
    ]
    return [table(*one, as_markdown) for one in found]


# ---- plots ----


def plot_trade(records: Records, file: Path) -> None:
    """Plot step time over peak reserved memory, a point for each measured contender: lower left is better."""
    measured = [record for record in records.of("summary") if record["step_ms_median"]]
    points = []
    for record in sorted(measured, key=lambda record: record["label"] not in OURS):
        label, nbytes = record["label"], record["peak_reserved_bytes"] or 0  # without a GPU no allocator has a peak
        edge = "black" if label in OURS else "none"
        style = {"marker": "s" if label in CHECKPOINTED else "o", "edgecolors": edge}
        points.append((CONTENDERS[label], nbytes, record["step_ms_median"], style))
    title = "squares: with checkpointing; black edges: this project"
    plot_points(file, points, title, xlabel="peak reserved on the device, GiB", ylabel="ms a step")
