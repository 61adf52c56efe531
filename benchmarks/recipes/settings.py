# SPDX-License-Identifier: Apache-2.0
"""The command line, and what one process of the benchmark does. No torch here, so that mistakes are cheap."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.flags import add_flags, assignment, new_parser, output_file, positive, refuse, words
from benchmarks.gpu.settings import LATENTS, SETUPS, Entry, Shape

CONTENDERS = ("none", "ours", "taken-over", "incumbent")
SHARDINGS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
WARMUP = 4  # eager steps before a capture; megatron-core's default is 3

_INCUMBENTS_SETTINGS = ("taken-over", "incumbent")
_DESCRIPTION = """Training steps as recipes set them up, without offload, with this engine and with megatron-core's own.

Contenders take their turns, each in a process of its own whose model is built with its settings:

none         no offload
ours         this engine, through megatron_patches.apply()
taken-over   this engine, with megatron-core's settings as they are (--offload-engine)
incumbent    megatron-core's own offload

Behind an @ come further settings: of ours fields of OffloadConfig, of the last two fields of TransformerConfig, as in
"ours@cpu_affinity=True" and "incumbent@delay_offload_until_cuda_graph=False". Needs a GPU."""


class _Recipe(NamedTuple):
    setup: str
    modules: tuple[str, ...]
    scopes: tuple[str, ...] = ()


_EXPERTS = ("core_attn", "attn_proj", "expert_fc1", "moe_act")
_RECIPES = {
    "none": _Recipe("b", _EXPERTS),
    "layers": _Recipe("fine-2", _EXPERTS, ("attn", "moe_router")),
    "step": _Recipe("a", ("qkv_linear",)),
}


class Job(NamedTuple):
    """What one process does."""

    contender: Entry
    """Its kind, and behind the @ its settings."""
    graphs: str
    scopes: tuple[str, ...]
    shape: Shape
    modules: tuple[str, ...]
    recomputed: tuple[str, ...]
    has_latents: bool
    sharding: str | None
    num_steps: int

    def config_fields(self) -> dict[str, Any]:
        """Return the fields of TransformerConfig in which its model differs from one without all of this."""
        fields: dict[str, Any] = dict(LATENTS) if self.has_latents else {}
        if self.recomputed:
            fields |= {"recompute_granularity": "selective", "recompute_modules": list(self.recomputed)}
        if self.graphs == "layers":
            fields |= {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": list(self.scopes)}
        elif self.graphs == "step":
            fields["cuda_graph_impl"] = "full_iteration"
        if self.graphs != "none":
            fields["cuda_graph_warmup_steps"] = WARMUP
        if self.contender.kind in _INCUMBENTS_SETTINGS:
            fields |= {"fine_grained_activation_offloading": True, "offload_modules": list(self.modules)}
            fields |= {"delay_offload_until_cuda_graph": True} if self.graphs == "layers" else {}
            fields |= dict(self.contender.engine)
        return fields


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; on a mistake end the process with a message, as argparse does.

    Returns:
        The flags by name, and `jobs`: one of each contender, in order.
    """
    parser = _parser()
    args = parser.parse_args(arguments)
    recipe = _RECIPES[args.graphs]
    shape = replace(SETUPS[recipe.setup], pp=1, vpp=0, ep=1)
    shape = replace(shape, layers=args.layers or shape.layers)
    try:
        contenders = [_contender(text) for text in args.contenders]
    except ValueError as error:
        parser.error(str(error))
    refuse(
        parser,
        {
            "--scopes are of --graphs layers": args.scopes and args.graphs != "layers",
            "--sharding is for --graphs none": args.sharding and args.graphs != "none",
        },
    )
    common: dict[str, Any] = {
        **{"graphs": args.graphs, "scopes": tuple(args.scopes or recipe.scopes), "shape": shape},
        **{"modules": tuple(args.modules or recipe.modules), "recomputed": tuple(args.recompute)},
        **{"has_latents": args.latents, "sharding": args.sharding, "num_steps": args.iters},
    }
    args.jobs = [Job(contender=contender, **common) for contender in contenders]
    return args


def _contender(text: str) -> Entry:
    kind, at, assigned = text.partition("@")
    if kind not in CONTENDERS:
        raise ValueError(f"unknown contender {kind!r}: there are {', '.join(CONTENDERS)}")
    if at and (kind == "none" or not assigned):
        raise ValueError(f"{text}: behind the @ come settings, NAME=VALUE, of a contender that offloads")
    return Entry(kind, engine=tuple(assignment(word) for word in words(assigned)))


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("recipes", _DESCRIPTION)
    graphs = "what is captured: nothing (of setup b), parts of layers (by TransformerEngine; fine-2), or a step (a)"
    parser.add_argument("--graphs", choices=sorted(_RECIPES), default="none", help=f"{graphs} (default none)")
    parser.add_argument("--scopes", nargs="+", metavar="NAME", help="captured parts (default attn moe_router)")
    parser.add_argument("--modules", nargs="+", metavar="NAME", help="to offload")
    parser.add_argument("--recompute", nargs="+", default=[], metavar="NAME", help="recomputed by every contender")
    parser.add_argument("--sharding", choices=SHARDINGS, help="under Megatron-FSDP, with this strategy")
    parser.add_argument("--contenders", nargs="+", default=["none", "ours", "incumbent"], metavar="NAME[@SETTINGS]")
    add_flags(
        parser,
        ("--latents", bool, False, "multi-latent attention, in which all norms are modules of their own"),
        ("--rounds", positive, 2, "turns of each contender"),
        ("--iters", positive, 8, "timed steps of a turn"),
        ("--layers", int, None, "of the model, in place of the setup's"),
        ("--json", output_file, None, "append a record of each turn to this file"),
    )
    return parser
