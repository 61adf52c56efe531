# SPDX-License-Identifier: Apache-2.0
"""Budgets from the floor to no offload, beside settings made by hand. No torch until something is measured."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.flags import add_flags, input_file, new_parser, positive
from benchmarks.frontends.settings import TINY, Shape, add_model_flags, default_layers

from .report import plot, print_length

_PACKAGES = ("torch", "transformers")
_FIRST = ("none", "all")
"""The ends between which budgets are."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    settings = parse(arguments)
    if settings.draw:
        plot(json.loads(settings.draw.read_text())["lengths"], settings.plot)
        return 0
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
    lengths: list[dict[str, Any]] = []
    found: dict[str, Any] = {"run": {**provenance(_PACKAGES), "device": name}, "lengths": lengths}

    def write() -> None:
        found["run"]["seconds"] = time.perf_counter() - begin
        if settings.json:
            settings.json.write_text(json.dumps(found, indent=1) + "\n")

    for index, shape in enumerate(settings.shapes):
        left = settings.seconds - (time.perf_counter() - begin)
        lengths.append({"seq": shape.seq, "layers": shape.layers, "turns": [], "left_out": []})
        deadline = time.perf_counter() + left / (len(settings.shapes) - index)
        _measure(settings, shape, lengths[-1], deadline, write)
    for length in lengths:
        print_length(length, settings.markdown)
    if settings.plot:
        plot(lengths, settings.plot)
    return int(any(turn["failure"] for length in lengths for turn in length["turns"] if turn["budget_bytes"]))


def _measure(
    settings: argparse.Namespace, shape: Shape, length: dict[str, Any], deadline: float, write: Callable[[], None]
) -> None:
    from tqdm import tqdm

    from .by_hand import layers, settings_by_hand
    from .measure import TrainedWorkload, Turns

    workload = TrainedWorkload(shape, settings.device)
    turns = Turns(workload, settings.warmup, settings.iters)
    by_hand = settings_by_hand(settings.device, workload)
    with tqdm(total=len(by_hand) + settings.budgets, unit="turn", desc=f"{shape.seq:,} tokens") as bar:

        def take(name: str, nbytes: int | None) -> dict[str, Any]:
            bar.set_postfix_str(name)
            attach = by_hand[name] if nbytes is None else layers(settings.device, gpu_budget=nbytes)
            # What a failure leaves behind would count as memory of the next one.
            is_over = time.perf_counter() > deadline or any(turn["failure"] for turn in length["turns"])
            found = {"failure": "left out"} if is_over else turns.run(name, attach, nbytes)
            length["left_out" if is_over else "turns"].append(name if is_over else found)
            write()
            bar.update()
            return found

        ends = [take(name, None) for name in _FIRST]
        rest: list[tuple[str, int | None]] = [(name, None) for name in by_hand if name not in _FIRST]
        budgets: list[tuple[str, int | None]] = []
        if not any(end["failure"] for end in ends):
            most, least = (end["held_bytes"] for end in ends)
            sizes = budgets_between(least, most, settings.budgets)
            budgets = [(f"budget {nbytes >> 20:,} MiB", nbytes) for nbytes in sizes]
        for name, nbytes in alternately(budgets, rest):
            take(name, nbytes)


def budgets_between(least: int, most: int, num: int) -> list[int]:
    """Spread budgets evenly, the first a little above the floor, the last a little above no offload."""
    margin = (most - least) // 50
    return [least + margin + (most - least) * i // max(1, num - 1) for i in range(num)]


def alternately(one: Sequence[Any], other: Sequence[Any]) -> list[Any]:
    """Mix two lists evenly, so that both see the same drift of the machine."""
    places = [(index / max(1, len(each)), each[index]) for each in (one, other) for index in range(len(each))]
    return [item for _, item in sorted(places, key=lambda place: place[0])]
