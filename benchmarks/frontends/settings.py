# SPDX-License-Identifier: Apache-2.0
"""The command line of the benchmark: shape, contenders, bounds. No torch here, so that mistakes are cheap."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.flags import add_engine_flag, bytes_flag, engine_settings, settings_of, words

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
    "te_v2": "TransformerEngine get_cpu_offload_context v2",
    "te_v1": "TransformerEngine get_cpu_offload_context v1, filter of weights",
}
OURS = frozenset({"layers", "any_model", "any_model_2", "layers_ckpt", "wrapper", "parts"})
CHECKPOINTED = frozenset(
    {"ckpt", "layers_ckpt", "wrapper", "parts", "verl_ckpt", "ckpt_torch", "parts_torch", "ckpt_save"}
)
NEED_GPU = frozenset({"te_v2", "te_v1", "verl", "verl_ckpt", "torchtune", "trl"})
"""They make CUDA streams."""
_SLOW_IMPORT = frozenset({"te_v2", "te_v1"})

# Part of a run of --recording -> what the table says, in its order.
RECORDED_PARTS = {
    "none": "no step recorded",
    "each": "each step recorded",
    "one": "one step recorded",
    "behind_one": "the step behind it",
    "file": "one step recorded, with a file",
    "behind_file": "the step behind it, while the file is written",
}


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

    def check(self) -> None:
        """Raises:
        ValueError: for sizes that do not fit each other.
        """
        if min(dataclasses.astuple(self)) < 1:
            raise ValueError(f"every size must be at least 1, got {self}")
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"{self.hidden} hidden, {self.heads} heads and {self.kv_heads} key-value heads do not divide each other"
            )


_TINY = dict(hidden=64, ffn=128, heads=4, kv_heads=2, vocab=256)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that the command line says."""

    shape: Shape
    seq: int | None
    """As given."""
    device: str
    is_tiny: bool
    has_head: bool
    contenders: tuple[str, ...]
    rounds: int
    iters: int
    warmup: int
    contender_seconds: float
    host_bytes: int | None
    device_bytes: int | None
    engine: dict[str, Any]
    group_bytes: int | None
    rivals: Path | None
    recording: bool
    longest: bool
    longest_unit: int
    longest_upper: int | None
    total_seconds: float
    resume: Path | None
    documents: int | None
    json: Path | None
    markdown: bool
    plot: Path | None

    @property
    def engine_host_bytes(self) -> int:
        """Return the host bytes for an engine: less than those of a contender, because its process takes some too."""
        return int(self.engine.get("host_limit_bytes", 0.9 * (self.host_bytes or 0)))


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """Read the command line; on a mistake end the process with a message, as argparse does."""
    parser = _parser()
    args = parser.parse_args(arguments)
    counts = (1, 2, 2) if args.quick else (2, 3, 2)
    rounds, iters, warmup = (
        given if given is not None else default
        for given, default in zip((args.rounds, args.iters, args.warmup), counts, strict=True)
    )
    if min(rounds, iters, warmup) < 1:
        parser.error("--rounds, --iters-per-round and --warmup must be at least 1")
    try:
        shape = _shape(args)
        contenders = _contenders(args)
        engine = engine_settings(args)
        bounds = [_positive(name, getattr(args, name)) for name in ("host_gib", "device_gib")]
    except ValueError as error:
        parser.error(str(error))
    if args.rivals and not args.rivals.is_dir():
        parser.error(f"--rivals {args.rivals} is not a folder")
    if args.total_seconds and not args.longest:
        parser.error("--total-seconds bounds the search of --longest: add --longest")
    if args.recording and args.longest:
        parser.error("--recording and --longest are two benchmarks: give one of them")
    if args.resume and not args.longest:
        parser.error("--resume continues a search of --longest: add --longest")
    if args.resume and not args.resume.is_file():
        parser.error(f"--resume {args.resume} is not a file")
    seconds = args.contender_seconds or (90.0 if args.longest else 6.0 if args.quick else 15.0)
    unit = args.longest_unit or (32 if args.is_tiny else 8192)
    length = unit if args.longest else shape.seq
    if args.documents and (args.documents < 1 or length % args.documents):
        parser.error(f"--documents {args.documents} do not divide a sequence of {length:,} tokens")
    return settings_of(
        Settings,
        args,
        shape=shape,
        contenders=contenders,
        rounds=rounds,
        iters=iters,
        warmup=warmup,
        contender_seconds=seconds,
        host_bytes=bounds[0],
        device_bytes=bounds[1],
        engine=engine,
        group_bytes=args.group_bytes if args.group_bytes is not None else 4096 if args.is_tiny else None,
        longest_unit=unit,
        total_seconds=args.total_seconds or 330.0,
    )


def _shape(args: argparse.Namespace) -> Shape:
    values: dict[str, Any] = dict(_TINY) if args.is_tiny else {}
    values["seq"] = 64 if args.is_tiny else 4096 if args.quick else 32768
    values |= {f.name: given for f in dataclasses.fields(Shape) if (given := getattr(args, f.name)) is not None}
    values.setdefault("layers", 4 if args.is_tiny or args.longest else default_layers(values["seq"]))
    shape = Shape(**values)
    shape.check()
    return shape


def default_layers(seq: int) -> int:
    """Choose layers that save about 30 GB at this length, 4 to 12: host memory and time bound what can be compared."""
    return max(4, min(12, 4 * 32768 // seq))


def _contenders(args: argparse.Namespace) -> tuple[str, ...]:
    if args.contenders is None:
        return tuple(name for name in CONTENDERS if not (args.quick and name in _SLOW_IMPORT))
    named = words(args.contenders)
    unknown = [name for name in named if name not in CONTENDERS]
    if unknown or not named:
        raise ValueError(f"unknown contenders {unknown}: there are {', '.join(CONTENDERS)}")
    return named


def _positive(name: str, nbytes: int | None) -> int | None:
    if nbytes == 0:
        raise ValueError(f"--{name.replace('_', '-')} must be positive, got 0")
    return nbytes


def _parser() -> argparse.ArgumentParser:
    names = "; ".join(f"{name}: {title}" for name, title in CONTENDERS.items())
    parser = argparse.ArgumentParser(
        prog="benchmarks/run.py frontends",
        description="The front-ends and what else offloads activations, interleaved, on one device. "
        "The model is a Qwen2 of random weights.",
        epilog=f"Contenders: {names}.",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", dest="is_tiny", action="store_true", help="a model of a few kilobytes: tries the program itself"
    )
    parser.add_argument("--quick", action="store_true", help="one short round at 4096 tokens, without slow imports")
    for field in dataclasses.fields(Shape):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=int, metavar="N", help="instead of the default, Qwen2-7B's"
        )
    parser.add_argument(
        "--head", dest="has_head", action="store_true", help="with the language model head and its loss"
    )
    parser.add_argument("--contenders", metavar="A,B", help="in order; without this flag all (--help lists them)")
    parser.add_argument("--rounds", type=int, metavar="N", help="times all contenders take their turn (default 2)")
    parser.add_argument(
        "--iters-per-round", type=int, dest="iters", metavar="N", help="timed steps of a turn (default 3)"
    )
    parser.add_argument("--warmup", type=int, metavar="N", help="steps before the turn's peaks are reset (default 2)")
    parser.add_argument(
        "--contender-seconds",
        type=float,
        metavar="S",
        help="time limit of each contender over all its turns; results until then are reported (default 15, with "
        "--quick 6, with --longest 90)",
    )
    parser.add_argument(
        "--host-gib",
        type=bytes_flag("GiB"),
        metavar="G",
        help="host memory a contender may take, in GiB or as 500MiB (default 80%%)",
    )
    parser.add_argument(
        "--device-gib",
        type=bytes_flag("GiB"),
        metavar="G",
        help="limit on device memory, as on a smaller GPU, in GiB or as 500MiB",
    )
    add_engine_flag(parser)
    parser.add_argument("--group-bytes", type=bytes_flag(), metavar="SIZE", help="group_bytes of manage_activations")
    parser.add_argument(
        "--rivals",
        type=Path,
        metavar="DIR",
        help="folder with verl/utils/activation_offload.py, trl/models/activation_offloading.py and "
        "torchtune/training/_activation_offloading.py (or these files alone), for rivals that are not installed",
    )
    parser.add_argument(
        "--recording",
        action="store_true",
        help="measure what it costs to record steps, at 4096, 8192 and 16384 tokens, or at --seq, over --rounds rounds",
    )
    parser.add_argument("--longest", action="store_true", help="find the longest sequence that each contender trains")
    parser.add_argument("--longest-unit", type=int, metavar="N", help="precision of --longest in tokens (8192)")
    parser.add_argument("--longest-upper", type=int, metavar="N", help="upper bound of --longest (default: computed)")
    parser.add_argument(
        "--total-seconds",
        type=float,
        metavar="S",
        help="approximate time limit of the search of --longest, which reports its results until then (default 330)",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="continue the search of --longest from the trials in FILE, the --json of an earlier run with the same "
        "model and machine",
    )
    parser.add_argument(
        "--documents",
        type=int,
        metavar="N",
        help="pack the sequence from documents of N tokens, with attention inside each: memory is that of attention to "
        "the whole sequence, but time grows linearly with its length",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one JSON object a figure")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown too")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="PNG",
        help="step time and peak reserved memory of each contender; with --longest the longest sequences",
    )
    return parser
