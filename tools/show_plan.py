#!/usr/bin/env python3
"""Shows in which order each pipeline rank runs its chunks, and how many chunks' activations are alive at each point.

python tools/show_plan.py --pp 2 --vpp 2 --microbatches 8 [--rank R] [--png FILE]

F1.3 is the forward of virtual stage 1 for microbatch 3, B1.3 its backward. The number below an action is how many
chunks wait then: their forward is done, their backward is not, so their activations are alive.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from offload_engine.schedule import (
    Action,
    ChunkKey,
    count_alive,
    format_actions,
    interleaved,
    no_pipelining,
    one_forward_one_backward,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = {"F": "cyan", "B": "magenta"}
NARROW_COLUMNS = 19  # of a terminal: the other two columns and all borders


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        plans = {rank: make_plan(options, rank) for rank in selected_ranks(options)}
    except ValueError as error:
        parser.error(str(error))
    console = Console()
    console.print(order_table(plans, describe(options), console.width))
    if options.png is not None:
        try:
            draw(plans, describe(options), options.png)
        except (OSError, ValueError) as error:  # ValueError: a file type that matplotlib does not write
            print(f"show_plan.py: error: cannot write {options.png}: {error}", file=sys.stderr)
            return 1
        console.print(f"plot: {options.png}", soft_wrap=True)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The options, by the names of the functions in `offload_engine.schedule`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=1, metavar="N", help="pipeline stages (default: 1)")
    parser.add_argument("--vpp", type=int, metavar="N", help="virtual stages of each rank (default: no interleaving)")
    parser.add_argument("--microbatches", type=int, required=True, metavar="N", help="microbatches of a step")
    parser.add_argument("--group-size", type=int, metavar="N", help="microbatches of a turn of a virtual stage (--pp)")
    parser.add_argument(
        "--overlap-expert-comm", action="store_true", help="as with --overlap-moe-expert-parallel-comm of megatron-core"
    )
    parser.add_argument("--rank", type=int, metavar="R", help="this pipeline rank only (default: all)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw which chunks are alive when")
    return parser


def selected_ranks(options: argparse.Namespace) -> Sequence[int]:
    """The ranks to show.

    Raises:
        ValueError: if the pipeline has no such rank.
    """
    if options.pp < 1:
        raise ValueError(f"--pp must be at least 1, got {options.pp}")
    if options.rank is None:
        return range(options.pp)
    if not 0 <= options.rank < options.pp:
        raise ValueError(f"--rank must be in [0, {options.pp - 1}] with --pp {options.pp}, got {options.rank}")
    return [options.rank]


def make_plan(options: argparse.Namespace, rank: int) -> list[Action]:
    """The actions of one rank.

    Raises:
        ValueError: if no schedule has this shape, or an option does not apply to it.
    """
    if options.vpp is not None:
        return interleaved(
            options.pp, rank, options.vpp, options.microbatches, options.group_size, options.overlap_expert_comm
        )
    if options.group_size is not None:
        raise ValueError("--group-size is about virtual stages: it needs --vpp")
    if options.pp == 1:
        return no_pipelining(options.microbatches, options.overlap_expert_comm)
    if options.overlap_expert_comm:
        raise ValueError("--overlap-expert-comm needs --vpp where --pp is more than 1")
    return one_forward_one_backward(options.pp, rank, options.microbatches)


def describe(options: argparse.Namespace) -> str:
    """The shape in words."""
    stages = f"{options.pp} pipeline stage" + "s" * (options.pp > 1)
    virtual = "" if options.vpp is None else f", {options.vpp} virtual stages each"
    return f"{stages}{virtual}, {options.microbatches} microbatches"


def order_table(plans: dict[int, list[Action]], title: str, width: int) -> Table:
    """One row a rank; actions in rows that fit into `width` columns of a terminal."""
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("rank", justify="right")
    table.add_column("order, and below how many chunks are alive", no_wrap=True)
    table.add_column("most", justify="right")
    for rank, actions in plans.items():
        table.add_row(str(rank), order_text(actions, width - NARROW_COLUMNS), str(max(count_alive(actions))))
    return table


def order_text(actions: Sequence[Action], width: int) -> Text:
    """Lines of actions, each above a line of how many chunks are alive after them."""
    words = [format_actions([action]) for action in actions]
    alive = count_alive(actions)
    cell = max(map(len, words)) + 1
    per_line = max(1, (width + 1) // cell)
    text = Text()
    for first in range(0, len(actions), per_line):
        line = slice(first, first + per_line)
        for action, word in zip(actions[line], words[line], strict=True):
            text.append(word.ljust(cell), STYLES[action.kind])
        text.append("\n")
        text.append("".join(str(count).ljust(cell) for count in alive[line]), "dim")
        text.append("\n")
    text.right_crop(1)
    return text


def waiting_spans(actions: Sequence[Action]) -> dict[ChunkKey, tuple[int, int]]:
    """From the end of its forward to the end of its backward, in numbers of actions, for each chunk."""
    end = {action: position + 1 for position, action in enumerate(actions)}
    return {a.chunk: (end[a], end[Action("B", a.chunk)]) for a in actions if a.kind == "F"}


def draw(plans: dict[int, list[Action]], title: str, path: Path) -> None:
    """Writes the timeline: for each rank how many chunks are alive, and below a bar for each chunk while it is."""
    os.environ.setdefault("MPLBACKEND", "Agg")  # there may be no display
    import matplotlib.pyplot as plt

    heights = [height for actions in plans.values() for height in (1.0, 0.4 + 0.15 * len(waiting_spans(actions)))]
    figure, axes = plt.subplots(
        2 * len(plans), 1, figsize=(11, 1.2 + sum(heights)), height_ratios=heights, sharex=True, squeeze=False
    )
    panels = axes[:, 0]
    for (rank, actions), count_panel, bar_panel in zip(plans.items(), panels[0::2], panels[1::2], strict=True):
        draw_count(count_panel, rank, actions)
        draw_bars(bar_panel, actions)
    panels[0].set_xlim(0, max(map(len, plans.values())))
    panels[-1].set_xlabel("forwards and backwards of the rank, in its own order (not time)")
    figure.suptitle(f"Chunks alive (forward done, backward not): {title}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_count(panel: Axes, rank: int, actions: Sequence[Action]) -> None:
    """Draw how many chunks are alive after each action."""
    alive = count_alive(actions)
    panel.fill_between(range(len(actions) + 1), [0, *alive], step="post", color="0.8")
    panel.set_ylim(0, max(alive) + 0.5)
    panel.set_yticks([0, max(alive)])
    panel.set_ylabel("alive")
    panel.set_title(f"rank {rank}: at most {max(alive)} alive", loc="left", fontsize=10)


def draw_bars(panel: Axes, actions: Sequence[Action]) -> None:
    """A bar for each chunk while it is alive, in the order of the forwards; a colour for each virtual stage."""
    spans = waiting_spans(actions)
    labelled: set[int] = set()
    for row, (key, (begin, end)) in enumerate(spans.items()):
        label = None if key.stage in labelled else f"virtual stage {key.stage}"
        labelled.add(key.stage)
        panel.barh(row, end - begin, left=begin, height=0.8, color=f"C{key.stage % 10}", label=label)
    panel.set_yticks(range(len(spans)), [f"{key.stage}.{key.microbatch}" for key in spans], fontsize=6)
    panel.set_ylim(len(spans), -1)
    panel.set_ylabel("stage.microbatch")
    if len(labelled) > 1:
        panel.legend(loc="lower left", fontsize=7, frameon=False)


if __name__ == "__main__":
    sys.exit(main())
