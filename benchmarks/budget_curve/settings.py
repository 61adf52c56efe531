# SPDX-License-Identifier: Apache-2.0
"""The command line of the benchmark. No torch here, so that mistakes are cheap."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.flags import settings_of
from benchmarks.frontends.settings import Shape, default_layers

TINY = dict(hidden=64, ffn=128, heads=4, kv_heads=2, vocab=256)
_LENGTHS = (4096, 32768)
_TINY_LENGTHS = (64,)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that the command line says."""

    device: str
    shapes: tuple[Shape, ...]
    """One for each length."""
    is_tiny: bool
    budgets: int
    iters: int
    warmup: int
    seconds: float
    json: Path | None
    plot: Path | None
    draw: Path | None
    markdown: bool


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """Read the command line; on a mistake end the process with a message, as argparse does."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if min(args.budgets, args.iters, args.warmup) < 1:
        parser.error("--budgets, --iters and --warmup must be at least 1")
    if args.draw and not args.plot:
        parser.error("--draw FILE draws into the file of --plot: give it")
    if args.draw and not args.draw.is_file():
        parser.error(f"--draw {args.draw} is not a file")
    return settings_of(Settings, args, shapes=_shapes(args))


def _shapes(args: argparse.Namespace) -> tuple[Shape, ...]:
    sizes = TINY if args.is_tiny else {}
    lengths = args.seq or (_TINY_LENGTHS if args.is_tiny else _LENGTHS)
    return tuple(
        Shape(seq=length, layers=args.layers or (6 if args.is_tiny else default_layers(length)), **sizes)
        for length in lengths
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks/run.py budget_curve",
        description="Budgets from the floor to no offload, beside settings made by hand. The model is a Qwen2 of "
        "random weights, trained by SGD with a learning rate of 0, so that every step is the same.",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", dest="is_tiny", action="store_true", help="a model of a few kilobytes: tries the program itself"
    )
    parser.add_argument(
        "--seq", type=int, action="append", metavar="N", help="tokens of the one sequence; repeatable (4096 and 32768)"
    )
    parser.add_argument("--layers", type=int, metavar="N", help="of the model (12 at 4096 tokens, 4 at 32768)")
    parser.add_argument("--budgets", type=int, default=5, metavar="N", help="from the floor to no offload (default 5)")
    parser.add_argument("--iters", type=int, default=3, metavar="N", help="timed steps of a turn (default 3)")
    parser.add_argument(
        "--warmup", type=int, default=2, metavar="N", help="steps before them, of settings by hand (default 2)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=190.0,
        metavar="S",
        help="no turn begins later, each length has its share; what was left out is said (default 190)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results, after each turn")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw throughput over memory")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="draw the results of an earlier run, and run nothing")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    return parser
