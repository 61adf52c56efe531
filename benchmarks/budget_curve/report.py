# SPDX-License-Identifier: Apache-2.0
"""What the results of a run amount to: the table and the picture. Pure functions of the records."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.plots import picture
from benchmarks.tables import Rows

from .by_hand_titles import TITLES

MIB: Final = 1 << 20
GIB: Final = 1 << 30
Record = dict[str, Any]
HEAD: Final = (
    *("setting", "held MiB", "reserved", "moved", "recomputed", "ms", "over none", "best by hand that fits", "over it"),
    *("predicted MiB: first", "its step held", "last", "predicted ms", "steps", "host ms", "equal bits"),
)


def measured(length: Record) -> list[Record]:
    """Return the turns of a length that have figures."""
    return [turn for turn in length["turns"] if turn.get("step_ms")]


def step_ms(turn: Record) -> float:
    """Return the median of a turn's steps."""
    return statistics.median(turn["step_ms"])


def best_by_hand(turns: Sequence[Record], budget_bytes: int) -> Record | None:
    """Return the fastest setting by hand that fits a budget."""
    fitting = [turn for turn in turns if turn["budget_bytes"] is None and turn["held_bytes"] <= budget_bytes]
    return min(fitting, key=step_ms, default=None)


def print_length(length: Record, as_markdown: bool) -> None:
    """Print the table of one length."""
    turns = measured(length)
    none = next((turn for turn in turns if turn["setting"] == "none"), None)
    lines = [_line(turn, turns, none) for turn in turns]
    lines += [(_label(t), t["failure"] or "", *[""] * (len(HEAD) - 2)) for t in length["turns"] if not t.get("step_ms")]
    title = f"{length['seq']:,} tokens, {length['layers']} layers"
    if as_markdown:
        print(f"\n{title}\n")
    Rows(title, HEAD, lines, num_words=1).print(as_markdown)
    if length["left_out"]:
        print(f"left out, as the time was over or another one had failed: {', '.join(length['left_out'])}")


def _line(turn: Record, turns: Sequence[Record], none: Record | None) -> tuple[str, ...]:
    best = None if turn["budget_bytes"] is None else best_by_hand(turns, turn["budget_bytes"])
    sizes = [_mib(turn.get(f"{name}_bytes")) for name in ("held", "reserved", "moved", "recomputed")]
    ratio = f"{step_ms(turn) / step_ms(none):.4f}" if none is not None else ""
    against = ("", "") if best is None else (best["setting"], f"{step_ms(turn) / step_ms(best):.4f}")
    predicted = [_mib(turn.get(name)) for name in ("first_predicted_bytes", "first_held_bytes", "predicted_bytes")]
    predicted_ms = f"{turn['predicted_ms']:,.1f}" if "predicted_ms" in turn else ""
    host_ms = f"{turn['host_ms']:,.0f}" if "host_ms" in turn else ""
    parity = turn.get("parity")
    is_equal = "" if parity is None else "yes" if parity["is_bitwise_equal"] else "no"
    times = (f"{step_ms(turn):,.1f}", ratio, *against)
    return (
        *(_label(turn), *sizes, *times, *predicted),
        *(predicted_ms, str(turn.get("steps_until_held", "")), host_ms, is_equal),
    )


def _label(turn: Record) -> str:
    return turn["setting"] if turn["budget_bytes"] is None else f"budget {_mib(turn['budget_bytes'])} MiB"


def _mib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / MIB:,.{0 if nbytes >= GIB else 1}f}"


def plot(lengths: Sequence[Record], file: Path) -> None:
    """Draw throughput over memory: what one flag reaches, and settings by hand."""
    drawn = [length for length in lengths if measured(length)]
    num = max(1, len(drawn))
    with picture(file, 1, num, figsize=(1.5 + 5 * num, 4.6), squeeze=False) as (figure, row):
        for axes, length in zip(row[0], drawn, strict=False):
            _draw(axes, length)
        handles = {
            label: handle for axes in row[0] for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=2 * len(drawn),
            fontsize=7,
            frameon=False,
        )


def _draw(axes: Any, length: Record) -> None:
    turns = measured(length)
    unit, name = (GIB, "GiB") if max(turn["held_bytes"] for turn in turns) >= GIB else (MIB, "MiB")

    def rate(milliseconds: float) -> float:
        return float(length["seq"] / milliseconds)

    budgets = sorted((turn for turn in turns if turn["budget_bytes"] is not None), key=lambda turn: turn["held_bytes"])
    held = [turn["held_bytes"] / unit for turn in budgets]
    axes.plot(held, [rate(step_ms(turn)) for turn in budgets], "o-", color="tab:blue", label="a budget", zorder=3)
    predicted = [turn for turn in budgets if turn.get("predicted_ms")]
    axes.scatter(
        [turn["predicted_bytes"] / unit for turn in predicted],
        [rate(turn["predicted_ms"]) for turn in predicted],
        s=70,
        facecolors="none",
        edgecolors="tab:blue",
        label="as predicted",
        zorder=2,
    )
    markers = "sD^v<>PX*hp"
    for marker, (setting, title) in zip(markers, TITLES.items(), strict=True):
        for turn in turns:
            if turn["setting"] == setting:
                axes.scatter(
                    turn["held_bytes"] / unit, rate(step_ms(turn)), marker=marker, color="gray", label=title, zorder=1
                )
    axes.set(xlabel=f"held on the device, {name}", ylabel="thousand tokens a second")
    axes.set_title(f"{length['seq']:,} tokens, {length['layers']} layers", loc="left", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
