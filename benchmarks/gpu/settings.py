# SPDX-License-Identifier: Apache-2.0
"""The command line of the benchmark: setups, shapes, contenders. No torch here, so that mistakes are cheap."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.flags import (
    add_flags,
    assignment,
    new_parser,
    output_file,
    positive,
    refuse,
    words,
)

KINDS = ("none", "ours", "incumbent", "recompute")
_OFFLOAD = ("ours", "incumbent")

ENVIRONMENT = {
    "NVTE_CPU_OFFLOAD_V1": "1",  # TransformerEngine's first hooks, which megatron-core's offload needs
    "GLOO_SOCKET_IFNAME": "lo",  # every preset is for one host, which need not have a network that gloo could find
}

LATENTS: dict[str, Any] = {
    **{"multi_latent_attention": True, "rope_type": "rope", "q_lora_rank": 1536, "kv_lora_rank": 512},
    **{"qk_head_dim": 64, "qk_pos_emb_head_dim": 64, "v_head_dim": 128},
}
"""Fields of the configuration for attention with latents, whose heads are as large as those without."""

RECOMPUTABLE = ("core_attn", "moe_act", "layernorm", "mlp", "moe", "shared_experts")
"""What can be recomputed beside offload: values of `recompute_modules`."""

_BUDGET_WARMUP: Final = 9
"""Steps until the times of a decision are known. The first steps of a turn differ from later ones by up to 2%."""

_INCUMBENT_KNOWS = frozenset(
    {"attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act", "fused_group_mlp"}
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A GPT model and how it is spread; every field is a flag of the same name."""

    layers: int = 8
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    seq: int = 8192
    mbs: int = 1
    nmb: int = 4
    experts: int = 0
    topk: int = 2
    moeffn: int = 0
    pp: int = 1
    vpp: int = 0
    ep: int = 1
    vocab: int = 32000

    @property
    def activation_bytes(self) -> int:
        """Return the bytes of one [sequence, batch, hidden] activation in bf16."""
        return 2 * self.seq * self.mbs * self.hidden


_FIELDS = {
    **{"layers": "layers of the model", "hidden": "hidden size", "ffn": "that inside a dense MLP"},
    **{"heads": "attention heads", "seq": "tokens of a sequence", "mbs": "sequences of a microbatch"},
    **{"nmb": "microbatches of a step", "experts": "experts of a layer, 0: dense", "topk": "experts of a token"},
    **{"moeffn": "hidden size inside an expert", "pp": "pipeline stages", "vpp": "virtual stages of each, 0: none"},
    **{"ep": "ranks over which experts are spread", "vocab": "size of the vocabulary"},
}


_DENSE = Shape()
_MOE = Shape(layers=6, ffn=8192, experts=8, topk=2, moeffn=8192)
# Many small experts: the layout of the published results, and as many of its layers as two GPUs do in a second.
_FINE = Shape(layers=16, hidden=2048, heads=16, experts=64, topk=6, moeffn=1408, ffn=5632, seq=4096, mbs=2, nmb=8)
_TWO_STAGES: dict[str, Any] = dict(layers=8, nmb=8, pp=2, vpp=2)
SETUPS = {
    "a": _DENSE,
    "b": _MOE,
    "c-dense": dataclasses.replace(_DENSE, **_TWO_STAGES),
    "c-moe": dataclasses.replace(_MOE, **_TWO_STAGES),
    "d": dataclasses.replace(_MOE, **_TWO_STAGES, ep=4),
    "fine-8": dataclasses.replace(_FINE, pp=2, vpp=2, ep=4),
    "fine-2": dataclasses.replace(_FINE, layers=8, nmb=4, ep=2),
}
"""Presets, each for as many GPUs as it has pipeline stages times ranks of experts."""


@dataclass(frozen=True)
class Entry:
    """One contender of a run: what kind, and what it offloads."""

    kind: str
    modules: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    """Selectively, beside the offload of others."""
    engine: tuple[tuple[str, Any], ...] = ()
    """Fields of `OffloadConfig` and their values for this contender, of ours alone."""

    @property
    def gpu_budget(self) -> int | None:
        """Return the budget in bytes; None: all that the GPU has, or no budget."""
        return dict(self.engine).get("gpu_budget")

    @property
    def contender(self) -> str:
        """Return its name in records, which tells what recomputes beside offload."""
        return f"{self.kind}+recompute" if self.recomputed else self.kind

    @property
    def label(self) -> str:
        if self.kind == "budget":
            return f"budget {self.gpu_budget or 'auto'}"
        names = "+".join(",".join(some) for some in (self.modules, self.recomputed) if some)
        settings = ",".join(f"{name}={value}" for name, value in self.engine)
        return f"{self.kind} {names}".strip() + (f" @{settings}" if settings else "")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; on a mistake end the process with a message, as argparse does.

    Returns:
        The flags by name, and `shape`, `entries` and `model` (fields of TransformerConfig).
    """
    parser = _parser()
    args = parser.parse_args(arguments)
    changes = {f.name: value for f in dataclasses.fields(Shape) if (value := getattr(args, f.name)) is not None}
    try:
        args.shape = dataclasses.replace(SETUPS[args.setup], **changes)
        args.entries = make_entries(words(args.contenders), args.modules or ["qkv_linear"])
        args.model = {**_overlap(args), **(LATENTS if args.latents else {})}
    except ValueError as error:
        parser.error(str(error))
    kinds = {entry.kind for entry in args.entries}
    refuse(
        parser,
        {
            "--budget-curve needs --rounds of at least 2: the first one finds the range": args.budgets
            and args.rounds < 2,
            "--budget-curve ends where nothing is offloaded: name none among --contenders": (
                args.budgets and "none" not in kinds
            ),
        },
    )
    args.warmup = args.warmup or (_BUDGET_WARMUP if args.budgets else 2)
    if args.budgets:  # one of all that the GPU has: it moves nothing, and tells the lowest that can be reached
        args.entries = (*args.entries, Entry("budget"))
    return args


def make_entries(kinds: Sequence[str], module_sets: Sequence[str]) -> tuple[Entry, ...]:
    """List the contenders of one round, in order: each kind that offloads once for every set of modules.

    A set with what is recomputed behind a plus is for ours and the incumbent, one with settings of the engine behind an
    @ for ours alone.
    """
    unknown = set(kinds) - set(KINDS)
    if unknown or not kinds:
        raise ValueError(f"unknown contenders {sorted(unknown)}: there are {', '.join(KINDS)}")
    found: list[Entry] = []
    for text in module_sets if set(kinds) & set(_OFFLOAD) else [""]:
        names, at, assigned = text.partition("@")
        offloaded, plus, recomputed = names.partition("+")
        entry = Entry("ours", words(offloaded), words(recomputed), tuple(assignment(word) for word in words(assigned)))
        if plus and (not (entry.modules and entry.recomputed) or set(entry.recomputed) - set(RECOMPUTABLE)):
            raise ValueError(
                f"--modules {text}: behind a plus come some of {', '.join(RECOMPUTABLE)}, and modules before"
            )
        takers = ("ours",) if at else ("ours", "incumbent") if plus else _OFFLOAD
        if (plus or at) and not set(kinds) & set(takers):
            what = f"what is behind {'the @' if at else 'the plus'}"
            raise ValueError(f"--modules {text}: {what} is for {' and '.join(takers)}: name it among --contenders")
        for kind in kinds:
            if kind not in _OFFLOAD:
                found.append(Entry(kind))
            elif kind in takers:
                modules = incumbent_modules(entry.modules) if kind == "incumbent" else entry.modules
                found.append(dataclasses.replace(entry, kind=kind, modules=modules))
    return tuple(dict.fromkeys(found))


def incumbent_modules(names: Sequence[str]) -> tuple[str, ...]:
    """Return those of the names that megatron-core's own offload can offload."""
    known = tuple(name for name in names if name in _INCUMBENT_KNOWS)
    if not known:
        raise ValueError(f"the incumbent offloads none of {', '.join(names)}: leave it out of --contenders")
    if "attn_proj" in known and "core_attn" not in known:
        raise ValueError("the incumbent takes attn_proj only together with core_attn")
    return known


def _overlap(args: argparse.Namespace) -> dict[str, bool]:
    if not args.overlap_a2a:
        return {}
    if args.shape.ep < 2 or (args.shape.pp > 1 and not args.shape.vpp):
        raise ValueError("--overlap-a2a needs ep of at least 2, and virtual stages where there is a pipeline")
    if any(entry.kind == "recompute" or entry.recomputed for entry in args.entries):
        raise ValueError("--overlap-a2a excludes recomputation, also behind a plus in --modules")
    return {"overlap_moe_expert_parallel_comm": True}


def _parser() -> argparse.ArgumentParser:
    what = "This engine, no offload, megatron-core's own and its full recomputation, in turns, on GPUs."
    parser = new_parser("gpu", what)
    presets = ", ".join(f"{name}: {shape.pp * shape.ep}" for name, shape in SETUPS.items())
    parser.add_argument("--setup", choices=SETUPS, default="a", help=f"preset, each for a number of GPUs ({presets})")
    add_flags(
        parser, *((f"--{name}", int, None, f"{what}; of the setup unless given") for name, what in _FIELDS.items())
    )
    modules = "to offload (qkv_linear); if repeated, ours and the incumbent run once for each set. After a plus: to "
    modules += (
        f"recompute ({', '.join(RECOMPUTABLE)}); after an @: settings of ours, arguments of OffloadConfig.from_flags"
    )
    parser.add_argument("--modules", action="append", metavar="A,B[+C,D][@E=F]", help=modules)
    kinds = f"in order, of {', '.join(KINDS)} ("
    add_flags(
        parser,
        ("--contenders", str, "ours,none,incumbent", f"{kinds}recompute: all layers, one by one)"),
        ("--latents", bool, False, "multi-latent attention, in which all norms are modules of their own"),
        ("--overlap-a2a", bool, False, "overlap all-to-all with computation (overlap_moe_expert_parallel_comm)"),
        ("--rounds", positive, 3, "times all contenders take their turn"),
        ("--rotate", bool, False, "each round begins with the next contender: A B C, B C A, C A B"),
        ("--iters --iters-per-round", positive, 4, "timed steps of a turn"),
        (
            "--warmup",
            positive,
            None,
            f"steps before the turn's peaks are reset (default 2; {_BUDGET_WARMUP} beside budgets, which take as many)",
        ),
        ("--no-micro", bool, False, "skip the measurements of the machine: link, pinning, group"),
        (
            "--budgets --budget-curve",
            int,
            0,
            "beside the contenders: so many gpu_budgets, from the floor to no offload",
        ),
        ("--json", output_file, None, "append one JSON object a figure"),
        ("--trade-plot", output_file, None, "picture of tokens a second over peak reserved memory"),
    )
    return parser
