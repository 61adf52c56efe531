# SPDX-License-Identifier: Apache-2.0
"""What the results of a run amount to: the table and the picture. Pure functions of the records."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.tables import GIB, MIB, Column, Record, picture, show, table

TITLES: Final = {
    "none": "no offload",
    "all": "everything offloaded",
    "layers_ckpt": "each layer checkpointed, its input offloaded",
    "layers": "two layers on the device",
    "ckpt": "each layer checkpointed",
    "half_layers": "half of the layers on the device",
    "bytes_1/3": "a third of the bytes on the device",
    "every_other": "every other layer offloaded",
    "bytes_2/3": "two thirds of the bytes on the device",
    "half_ckpt": "every other layer checkpointed, its input offloaded",
    "any_model": "manage_activations",
}
"""Of the settings made by hand. In this order they take their turns."""
_MARKERS = "sD^v<>PX*hp"
_COLUMNS: dict[str, Column] = {
    "setting": lambda turn: turn["setting"] + (f": {turn['failure']}" if turn["failure"] else ""),
    "held MiB": ("held_bytes", "MiB"),
    "reserved": ("reserved_bytes", "MiB"),
    "moved": ("moved_bytes", "MiB"),
    "recomputed": ("recomputed_bytes", "MiB"),
    "ms": ("median_ms", ",.1f"),
    "over none": ("ratio", ".4f"),
    "ms in a row": ("row_ms", ",.1f"),
    "over none in a row": ("row_ratio", ".4f"),
    "best by hand that fits": "best",
    "over it": ("over_best", ".4f"),
    "predicted MiB: first": ("first_predicted_bytes", "MiB"),
    "its step held": ("first_held_bytes", "MiB"),
    "last": ("predicted_bytes", "MiB"),
    "predicted ms: first": ("first_predicted_ms", ",.1f"),
    "predicted ms": ("predicted_ms", ",.1f"),
    "steps": ("steps_until_held", ""),
    "host ms": ("host_ms", ",.0f"),
    "equal bits": "is_bitwise_equal",
}


def print_length(length: Record, as_markdown: bool) -> None:
    """Print the table of one length."""
    turns = _measured(length)
    lines = [_line(turn, turns) for turn in turns] + [turn for turn in length["turns"] if not turn.get("step_ms")]
    show(table(f"{length['seq']:,} tokens, {length['layers']} layers", _COLUMNS, lines, as_markdown))
    if length["left_out"]:
        print(f"left out, as the time was over or another one had failed: {', '.join(length['left_out'])}")


def _measured(length: Record) -> list[Record]:
    """Return the turns, those of one setting as one: with all their steps, and the most that they held."""
    found: dict[str, Record] = {}
    for turn in length["turns"]:
        if turn.get("step_ms"):
            first = found.setdefault(turn["setting"], {**turn, "step_ms": [], "in_a_row_ms": []})
            first["step_ms"] = [*first["step_ms"], *turn["step_ms"]]
            first["in_a_row_ms"] = [*first["in_a_row_ms"], *turn.get("in_a_row_ms", ())]
            first["held_bytes"] = max(first["held_bytes"], turn["held_bytes"])
    return list(found.values())


def _step_ms(turn: Record) -> float:
    return statistics.median(turn["step_ms"])


def _line(turn: Record, turns: Sequence[Record]) -> Record:
    """Return a turn with what the table says of it beside the others: the fastest by hand that fits its budget too."""
    line = {**turn, **turn.get("parity", {}), "median_ms": _step_ms(turn)}
    none = next((other for other in turns if other["setting"] == "none"), None)
    if none is not None:
        line["ratio"] = _step_ms(turn) / _step_ms(none)
    if none is not None and turn["in_a_row_ms"] and none["in_a_row_ms"]:
        line["row_ms"] = statistics.median(turn["in_a_row_ms"])
        line["row_ratio"] = line["row_ms"] / statistics.median(none["in_a_row_ms"])
    budget = turn["budget_bytes"] or 0
    fitting = [other for other in turns if other["budget_bytes"] is None and other["held_bytes"] <= budget]
    if best := min(fitting, key=_step_ms, default=None):
        line |= {"best": best["setting"], "over_best": _step_ms(turn) / _step_ms(best)}
    return line


def plot(lengths: Sequence[Record], file: Path) -> None:
    """Draw throughput over memory: what one flag reaches, and settings by hand."""
    drawn = [length for length in lengths if _measured(length)]
    num = max(1, len(drawn))
    with picture(file, 1, num, figsize=(1.5 + 5 * num, 4.6), squeeze=False) as (figure, row):
        legend: dict[str, Any] = {}
        for axes, length in zip(row[0], drawn, strict=False):
            _draw(axes, length)
            handles, labels = axes.get_legend_handles_labels()
            legend |= dict(zip(labels, handles, strict=True))
        options = {"loc": "outside lower center", "ncols": 2 * num, "fontsize": 7, "frameon": False}
        figure.legend(legend.values(), legend.keys(), **options)


def _draw(axes: Any, length: Record) -> None:
    turns = sorted(_measured(length), key=lambda turn: turn["held_bytes"])
    unit, name = (GIB, "GiB") if turns[-1]["held_bytes"] >= GIB else (MIB, "MiB")

    def points(found: Sequence[tuple[int, float]]) -> tuple[list[float], list[float]]:
        return [nbytes / unit for nbytes, _ in found], [length["seq"] / ms for _, ms in found]

    budgets = [turn for turn in turns if turn["budget_bytes"] is not None]
    held = points([(turn["held_bytes"], _step_ms(turn)) for turn in budgets])
    axes.plot(*held, "o-", color="tab:blue", label="a budget", zorder=3)
    predicted = points([(t["predicted_bytes"], t["predicted_ms"]) for t in budgets if t.get("predicted_ms")])
    style: dict[str, Any] = {"facecolors": "none", "edgecolors": "tab:blue", "zorder": 2}
    axes.scatter(*predicted, s=70, label="as predicted", **style)
    for marker, (setting, title) in zip(_MARKERS, TITLES.items(), strict=True):
        own = points([(turn["held_bytes"], _step_ms(turn)) for turn in turns if turn["setting"] == setting])
        if own[0]:
            axes.scatter(*own, marker=marker, color="gray", label=title, zorder=1)
    axes.set(xlabel=f"held on the device, {name}", ylabel="thousand tokens a second")
    axes.set_title(f"{length['seq']:,} tokens, {length['layers']} layers", loc="left", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
