# SPDX-License-Identifier: Apache-2.0
"""Budgets from the floor to no offload, beside settings made by hand. No torch until something is measured."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.budgets import spread
from benchmarks.flags import add_flags, input_file, new_parser, positive, set_defaults
from benchmarks.frontends.settings import ENVIRONMENT, TINY, Shape, add_model_flags, default_layers
from benchmarks.tables import Record

from .report import plot, print_length

_PACKAGES = ("torch", "transformers")
_ENDS = ("none", "all")
"""The first turns: budgets are between them."""
_MORE_TURNS = 3
"""Of no offload, between the others: a GPU that has worked for a minute is 3% slower than one that begins."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    settings = parse(arguments)
    if settings.draw:
        plot(json.loads(settings.draw.read_text())["lengths"], settings.plot)
        return 0
    set_defaults(ENVIRONMENT)
    import torch  # only now: mistakes are told at once

    if settings.device == "cuda" and not torch.cuda.is_available():
        print("this benchmark needs a GPU; --device cpu --tiny tries the program without one", file=sys.stderr)
        return 2
    return run(settings)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; on a mistake end the process with a message, as argparse does."""
    what = (
        "Budgets from the floor to no offload, beside settings made by hand. The model is a Qwen2 of random weights, "
    )
    parser = new_parser("budget_curve", f"{what}\ntrained by SGD with a learning rate of 0: every step is the same.")
    add_model_flags(parser)
    parser.add_argument("--seq", type=int, action="append", metavar="N", help="tokens; repeatable (4096 and 32768)")
    add_flags(
        parser,
        ("--layers", int, None, "of the model (12 at 4096 tokens, 4 at 32768)"),
        ("--budgets", positive, 5, "from the floor to no offload"),
        ("--iters", positive, 3, "timed steps of a turn"),
        (
            "--in-a-row",
            positive,
            None,
            "more steps of a turn, timed together: the host is ahead of the device, as in training",
        ),
        ("--warmup", positive, 2, "steps before them, of settings by hand"),
        ("--seconds", float, 190.0, "no turn begins later, each length has its share; what was left out is said"),
        ("--json", Path, None, "write the results, after each turn"),
        ("--plot", Path, None, "draw throughput over memory"),
        ("--draw", input_file, None, "draw the results of an earlier run, and run nothing"),
        ("--markdown", bool, False, "print the tables as Markdown"),
    )
    args = parser.parse_args(arguments)
    if args.draw and not args.plot:
        parser.error("--draw FILE draws into the file of --plot: give it")
    lengths = args.seq or ((64,) if args.tiny else (4096, 32768))
    layers = {seq: args.layers or (6 if args.tiny else default_layers(seq)) for seq in lengths}
    args.shapes = [Shape(seq=seq, layers=layers[seq], **(TINY if args.tiny else {})) for seq in lengths]
    return args


def run(settings: argparse.Namespace) -> int:
    """Run all settings at all lengths in this process; the results are written after each turn."""
    import torch

    from benchmarks.records import provenance

    begin = time.perf_counter()
    name = torch.cuda.get_device_name() if settings.device == "cuda" else "CPU"
    lengths: list[Record] = []
    found: Record = {"run": {**provenance(_PACKAGES), "device": name}, "lengths": lengths}
    for index, shape in enumerate(settings.shapes):
        left = settings.seconds - (time.perf_counter() - begin)
        lengths.append({"seq": shape.seq, "layers": shape.layers, "turns": [], "left_out": []})
        for _ in _measure(settings, shape, lengths[-1], left / (len(settings.shapes) - index)):
            found["run"]["seconds"] = time.perf_counter() - begin
            if settings.json:
                settings.json.write_text(json.dumps(found, indent=1) + "\n")
    for length in lengths:
        print_length(length, settings.markdown)
    if settings.plot:
        plot(lengths, settings.plot)
    return int(any(turn["failure"] for length in lengths for turn in length["turns"] if turn["budget_bytes"]))


def _measure(settings: argparse.Namespace, shape: Shape, length: Record, seconds: float) -> Iterator[None]:
    """Take the turns of a length, none later than after `seconds`; yield after each."""
    from tqdm import tqdm

    from .turns import TrainedWorkload, Turns

    deadline = time.perf_counter() + seconds
    turns = Turns(TrainedWorkload(shape, settings.device), settings.warmup, settings.iters, settings.in_a_row)
    waiting: list[tuple[str, int | None]] = [(name, None) for name in turns.by_hand]
    with tqdm(total=len(waiting) + settings.budgets + _MORE_TURNS, unit="turn", desc=f"{shape.seq:,} tokens") as bar:
        while waiting:
            name, nbytes = waiting.pop(0)
            bar.set_postfix_str(name)
            # What a failure leaves behind would count as memory of the next one.
            if time.perf_counter() > deadline or any(turn["failure"] for turn in length["turns"]):
                length["left_out"].append(name)
            else:
                length["turns"].append(turns.run(name, nbytes))
            yield
            bar.update()
            if name == _ENDS[-1] and not length["left_out"] and not any(turn["failure"] for turn in length["turns"]):
                most, least = (turn["held_bytes"] for turn in length["turns"])
                margin = (most - least) // 50  # the lowest is a little above the floor, the highest above no offload
                sizes = spread(least + margin, most + margin, settings.budgets)
                waiting = alternately([(f"budget {nbytes >> 20:,} MiB", nbytes) for nbytes in sizes], waiting)
                waiting = alternately(waiting, [(_ENDS[0], None)] * _MORE_TURNS)


def alternately(one: Sequence[Any], other: Sequence[Any]) -> list[Any]:
    """Mix two lists evenly, so that both see the same drift of the machine."""
    places = [(index / max(1, len(each)), each[index]) for each in (one, other) for index in range(len(each))]
    return [item for _, item in sorted(places, key=lambda place: place[0])]
