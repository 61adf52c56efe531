#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Shows in which order each pipeline rank runs its chunks, and how many chunks' activations are alive at each point.

python tools/show_plan.py --pp 2 --vpp 2 --microbatches 8 [--rank R]

F1.3 is the forward of virtual stage 1 for microbatch 3, B1.3 its backward. The number behind an action is how many
chunks wait then: their forward is done, their backward is not, so their activations are alive.

With --moves also which groups are copied out, released and copied in at which boundary of the step:

python tools/show_plan.py --pp 2 --vpp 2 --microbatches 8 --moves --layers 2 --names core_attn=321,2.2 mlp_fc1=128,2.9

Each name is a group of every layer, with its MiB (or a size as 1.5GiB) and the milliseconds of its forward, as far as
they are known. With milliseconds the step is simulated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from offload_engine.planning.plan import Plan, format_plan
from offload_engine.planning.planner import plan_step
from offload_engine.planning.shapes import Bounds, ChunkShape, GroupShape
from offload_engine.planning.simulate import PipelineJob, RankJob, Simulation, simulate
from offload_engine.schedule import (
    Action,
    count_alive,
    format_actions,
    interleaved,
    no_pipelining,
    one_forward_one_backward,
)
from offload_engine.sizes import bytes_flag, parse_bytes

STYLES = {"F": "cyan", "B": "magenta"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        if options.pp < 1 or options.rank not in (None, *range(options.pp)):
            raise ValueError(f"--rank must be one of --pp, got {options.rank} of {options.pp}")
        ranks = range(options.pp) if options.rank is None else [options.rank]
        orders = {rank: make_order(options, rank) for rank in ranks}
        job, plans = plan_moves(options) if options.moves else (None, [])
    except ValueError as error:
        parser.error(str(error))
    console = Console()
    title = f"{options.pp} pipeline stages, {options.vpp or 1} virtual stages each, {options.microbatches} microbatches"
    table = Table("rank", "order, and how many chunks are alive then", "most", title=title, show_lines=True)
    for rank, actions in orders.items():
        table.add_row(str(rank), order_text(actions), str(max(count_alive(actions))))
    console.print(table)
    for rank in ranks if options.moves else ():
        console.print(Text(f"# rank {rank}\n{format_plan(plans[rank])}"), soft_wrap=True)  # as `parse_plan` reads it
    if job is not None and any(group.forward_ms for group in job.ranks[0].shapes[0].groups):
        console.print(outcome_table(simulate(job, plans)))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Define the options, by the names of the functions in `offload_engine.schedule`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=1, metavar="N", help="pipeline stages (default: 1)")
    parser.add_argument("--vpp", type=int, metavar="N", help="virtual stages of each rank (default: no interleaving)")
    parser.add_argument("--microbatches", type=int, required=True, metavar="N", help="microbatches of a step")
    parser.add_argument("--group-size", type=int, metavar="N", help="microbatches of a turn of a virtual stage (--pp)")
    overlap = "as with --overlap-moe-expert-parallel-comm of megatron-core"
    parser.add_argument("--overlap-expert-comm", action="store_true", help=overlap)
    parser.add_argument("--rank", type=int, metavar="R", help="this pipeline rank only (default: all)")
    moves = parser.add_argument_group("moves of groups")
    moves.add_argument("--moves", action="store_true", help="print the plan of each rank")
    moves.add_argument("--layers", type=int, default=2, metavar="N", help="layers of each model chunk (default: 2)")
    names = "groups of each layer, in order"
    moves.add_argument("--names", nargs="+", default=["layer"], metavar="NAME[=MIB[,MS]]", help=names)
    for name, what in {
        "resident": "a budget of groups on the device",
        "horizon": "copy-ins ahead of the backward",
        "inflight": "copy-outs in flight",
    }.items():
        moves.add_argument(f"--{name}-mib", type=bytes_flag("MiB"), metavar="MIB", help=f"{what}; or a size, as 2GiB")
    return parser


def make_order(options: argparse.Namespace, rank: int) -> list[Action]:
    """List the actions of one rank."""
    if options.vpp is not None:
        sizes = options.vpp, options.microbatches, options.group_size
        return interleaved(options.pp, rank, *sizes, options.overlap_expert_comm)
    if options.group_size is not None:
        raise ValueError("--group-size is about virtual stages: it needs --vpp")
    if options.pp == 1:
        return no_pipelining(options.microbatches, options.overlap_expert_comm)
    if options.overlap_expert_comm:
        raise ValueError("--overlap-expert-comm needs --vpp where --pp is more than 1")
    return one_forward_one_backward(options.pp, rank, options.microbatches)


def order_text(actions: Sequence[Action]) -> Text:
    """Write the actions, each with the number of chunks that are alive after it."""
    pairs = zip(actions, count_alive(actions), strict=True)
    words = [((format_actions([action]), STYLES[action.kind]), (f":{count} ", "dim")) for action, count in pairs]
    return Text.assemble(*(part for word in words for part in word))


def plan_moves(options: argparse.Namespace) -> tuple[PipelineJob, list[Plan]]:
    """Plan the moves of all ranks."""
    shapes = (chunk_shape(options),) * (options.vpp or 1)
    bounds = Bounds(options.horizon_mib, options.inflight_mib, options.resident_mib)
    ranks = []
    for rank in range(options.pp):
        ranks.append(RankJob(tuple(make_order(options, rank)), shapes, bounds))
    is_combined = options.overlap_expert_comm
    plans = [plan_step(rank.actions, rank.shapes, rank.bounds, is_combined=is_combined) for rank in ranks]
    return PipelineJob(tuple(ranks)), plans


def chunk_shape(options: argparse.Namespace) -> ChunkShape:
    """Make a chunk with the groups that the options name."""
    if options.layers < 1:
        raise ValueError(f"--layers must be at least 1, got {options.layers}")
    groups = tuple(parse_group(text, layer) for layer in range(options.layers) for text in options.names)
    return ChunkShape(groups, options.layers)


def parse_group(text: str, layer: int) -> GroupShape:
    """Parse the group that `NAME=MIB,MS` describes; its backward takes twice as long as its forward."""
    name, _, sizes = text.partition("=")
    mib, _, milliseconds = sizes.partition(",")
    try:
        nbytes, forward_ms = parse_bytes(mib or "0", "MiB"), float(milliseconds or 0)
    except ValueError:
        raise ValueError(f"--names: expected NAME, NAME=MIB or NAME=MIB,MS, got {text!r}") from None
    return GroupShape(name, layer, nbytes, forward_ms, 2 * forward_ms)


def outcome_table(simulation: Simulation) -> Table:
    """Make a table with one row a rank: how long it takes, where it waits, and its bytes."""
    names = ("rank", "ms", "waits ms", "device MiB", "host MiB", "copied out MiB")
    table = Table(*names, title=f"simulated step: {simulation.milliseconds:.1f} ms")
    for rank, outcome in enumerate(simulation.ranks):
        counters = outcome.counters
        sizes = counters.peak_resident_bytes, counters.peak_host_bytes, counters.copied_out_bytes
        times = f"{outcome.milliseconds:.1f}", f"{outcome.stalled_ms:.1f}"
        table.add_row(str(rank), *times, *(f"{size / (1 << 20):,.0f}" for size in sizes))
    return table


if __name__ == "__main__":
    sys.exit(main())
