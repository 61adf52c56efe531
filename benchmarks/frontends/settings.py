# SPDX-License-Identifier: Apache-2.0
"""The command line of the benchmark: shape, contenders, bounds. No torch here, so that mistakes are cheap."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.flags import add_flags, new_parser, positive, refuse, words

ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""To be set before the first matrix product: without it there are no deterministic ones. As large as by default."""

# Flag -> what the tables say. In this order they take their turns: what is slow, or leaves memory behind, comes last.
CONTENDERS = {
    "none": "no offload",
    "layers": "enable_activation_offloading",
    "any_model": "manage_activations",
    "any_model_2": "manage_activations, ResidentBudget of two layers",
    "ckpt": "checkpointing",
    "layers_ckpt": "enable_activation_offloading, enable_ckpt=True",
    "wrapper": "checkpointing, offload_wrapper",
    "parts": "checkpointing of norms, attention and MLP each, offload_wrapper",
    "verl": "verl enable_activation_offloading",
    "verl_ckpt": "verl, enable_ckpt=True",
    "ckpt_torch": "checkpointing, PyTorch offload_wrapper",
    "parts_torch": "checkpointing of norms, attention and MLP each, PyTorch offload_wrapper",
    "ckpt_save": "checkpointing, save_on_cpu",
    "torch": "PyTorch offload_wrapper",
    "save": "save_on_cpu(pin_memory=True)",
    "torchtune": "torchtune OffloadActivations",
    "trl": "TRL OffloadActivations",
    "te_v1": "TransformerEngine get_cpu_offload_context v1, filter of weights",
}
OURS = frozenset({"layers", "any_model", "any_model_2", "layers_ckpt", "wrapper", "parts"})
CHECKPOINTED = frozenset(
    name for name, title in CONTENDERS.items() if "checkpointing" in title or "enable_ckpt" in title
)
TINY = dict(hidden=64, ffn=128, heads=4, kv_heads=2, vocab=256)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Qwen2 model and one sequence; every field is a flag of the same name."""

    layers: int
    seq: int
    hidden: int = 3584
    ffn: int = 18944
    heads: int = 28
    kv_heads: int = 4
    vocab: int = 152064


def default_layers(seq: int) -> int:
    """Choose layers that save about 30 GB at this length, 4 to 12: host memory and time bound what can be compared."""
    return max(4, min(12, 4 * 32768 // seq))


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add those that say on what a model runs."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    add_flags(parser, ("--tiny", bool, False, "a model of a few kilobytes: tries the program itself"))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; on a mistake end the process with a message, as argparse does.

    Returns:
        The flags by name, with defaults that depend on others filled in, and `shape`.
    """
    parser = _parser()
    args = parser.parse_args(arguments)
    values: dict[str, Any] = {"seq": 64, **TINY} if args.tiny else {"seq": 32768}
    values |= {f.name: given for f in dataclasses.fields(Shape) if (given := getattr(args, f.name)) is not None}
    values.setdefault("layers", 4 if args.tiny or args.longest else default_layers(values["seq"]))
    args.shape = Shape(**values)
    args.longest_unit = 32 if args.tiny else 8192  # tokens
    args.contender_seconds = args.contender_seconds or (90.0 if args.longest else 15.0)
    args.group_bytes = 4096 if args.tiny else None  # of manage_activations
    length = args.longest_unit if args.longest else args.shape.seq
    unknown = [name for name in args.contenders if name not in CONTENDERS]
    refuse(
        parser,
        {
            f"unknown contenders {unknown}: there are {', '.join(CONTENDERS)}": unknown,
            "--rivals is not a folder": args.rivals and not args.rivals.is_dir(),
            "--longest and --recording need a GPU": (args.longest or args.recording) and args.device == "cpu",
            f"--documents {args.documents} do not divide a sequence of {length:,} tokens": (
                args.documents and length % args.documents
            ),
        },
    )
    return args


def _parser() -> argparse.ArgumentParser:
    what = "The front-ends and what else offloads activations, interleaved, on one device. "
    names = "\n".join(f"  {name}: {title}" for name, title in CONTENDERS.items())
    parser = new_parser("frontends", f"{what}The model is a Qwen2 of random weights.", f"contenders:\n{names}")
    add_model_flags(parser)
    sizes = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(Shape)]
    add_flags(parser, *((size, int, None, "instead of the default, Qwen2-7B's") for size in sizes))
    parser.add_argument("--contenders", type=words, default=tuple(CONTENDERS), metavar="A,B", help="in order; else all")
    rivals = "folder with verl/utils/activation_offload.py, trl/models/activation_offloading.py and "
    rivals += "torchtune/training/_activation_offloading.py (or these files alone), for rivals that are not installed"
    add_flags(
        parser,
        ("--rounds", positive, 2, "times all contenders take their turn"),
        ("--iters --iters-per-round", positive, 3, "timed steps of a turn"),
        ("--warmup", positive, 2, "steps before the turn's peaks are reset"),
        ("--contender-seconds", float, None, "bound of each contender over all its turns (15, with --longest 90)"),
        ("--rivals", Path, None, rivals),
        ("--total-seconds", float, 330.0, "of --longest, which reports what it has found until then"),
        (
            "--documents",
            positive,
            None,
            "attention within documents of N tokens: memory is the same, time grows linearly",
        ),
        ("--json", Path, None, "append one JSON object a figure"),
        ("--markdown", bool, False, "print the tables as Markdown"),
    )
    add_flags(
        parser.add_mutually_exclusive_group(),
        ("--plot", Path, None, "picture of step time and reserved memory"),
        ("--recording", bool, False, "what it costs to record steps, at 4096, 8192 and 16384 tokens or at --seq"),
        ("--longest", bool, False, "find the longest sequence that each contender trains"),
    )
    return parser


def engine_host_bytes(args: argparse.Namespace) -> int:
    """Return the host bytes for an engine: less than those of a contender, because its process takes some too."""
    host_bytes = 0.9 * args.host_bytes
    if args.device == "cpu":  # its host tier is a directory, which others fill, too
        host_bytes = min(host_bytes, 0.5 * shutil.disk_usage(tempfile.gettempdir()).free)
    return int(host_bytes)
