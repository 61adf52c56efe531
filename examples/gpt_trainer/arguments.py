# SPDX-License-Identifier: Apache-2.0
"""The flags. Names and meanings are those of Megatron-LM's own trainer; dests are fields of its TransformerConfig."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megatron_patches import OneLineParser, add_offload_arguments, offload_config_from_args


class UsageError(Exception):
    """Raised for a mistake of the user; the message says what to change. It ends the run without a traceback."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line; exit with a message on a mistake, before anything is built."""
    parser = build_parser()
    args = parser.parse_args(arguments)
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    try:
        check_arguments(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with all flags of the trainer."""
    parser = OneLineParser(
        description="Pretrains a GPT with megatron-core, on GPUs over NCCL or CPUs over gloo. Start it with torchrun. "
        "Flags without a description are those of Megatron-LM's own trainer.",
        allow_abbrev=False,
    )
    for add in (_add_model, _add_moe, _add_parallelism, _add_memory, _add_training, _add_data, _add_checkpoints):
        add(parser)
    _add_metrics(parser)
    for action in parser._actions:
        if action.default not in (None, False, True, argparse.SUPPRESS, []) and "efault" not in (action.help or ""):
            action.help = f"{action.help or ''} (default: %(default)s)".strip()
    return add_offload_arguments(parser)


def check_arguments(args: argparse.Namespace) -> None:
    """Raises:
    ValueError: for flags that contradict each other.
    """
    if args.group_query_attention and args.num_query_groups is None:
        raise ValueError("--group-query-attention needs --num-query-groups")
    if args.moe_layer_freq is not None and args.num_moe_experts is None:
        raise ValueError("--moe-layer-freq needs --num-experts")
    if args.num_moe_experts is not None and args.moe_router_topk > args.num_moe_experts:
        raise ValueError(f"--moe-router-topk {args.moe_router_topk} is more than --num-experts {args.num_moe_experts}")
    if args.min_lr > args.lr:
        raise ValueError(f"--min-lr {args.min_lr} is above --lr {args.lr}")
    decay_iters = args.lr_decay_iters or args.train_iters
    if args.lr_warmup_iters >= decay_iters:
        raise ValueError(f"--lr-warmup-iters {args.lr_warmup_iters} must be below the {decay_iters} of the decay")
    if args.seq_length > args.max_position_embeddings:
        raise ValueError(f"--max-position-embeddings must be at least --seq-length {args.seq_length}")
    if args.save_interval is not None and args.save is None:
        raise ValueError("--save-interval needs --save")
    if args.mock_data and args.data_path:
        raise ValueError("--mock-data makes tokens up, and --data-path has some: leave one of the two out")
    if args.timeline_step is not None and args.timeline_json is None:
        raise ValueError("--timeline-step needs --timeline-json")
    _check_output_files(args)
    _check_virtual_stages(args)
    offload_config_from_args(args)  # raises if these flags are inconsistent


def _check_output_files(args: argparse.Namespace) -> None:
    for flag, path in (("--metrics-json", args.metrics_json), ("--timeline-json", args.timeline_json)):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{flag} {path}: there is no directory {path.parent}")


def _check_virtual_stages(args: argparse.Namespace) -> None:
    stages = args.num_virtual_stages_per_pipeline_rank
    layout = args.pipeline_model_parallel_layout
    if stages is not None and stages < 2:
        raise ValueError("--num-virtual-stages-per-pipeline-rank must be at least 2; leave it out for one")
    if stages is not None and args.pipeline_model_parallel_size == 1:
        raise ValueError("--num-virtual-stages-per-pipeline-rank needs --pipeline-model-parallel-size of at least 2")
    if layout is not None and stages is not None:
        raise ValueError("--pipeline-model-parallel-layout gives the virtual stages: leave out the other flag")
    ranks = args.pipeline_model_parallel_size * (stages or 1)
    if layout is None and args.num_layers % ranks != 0:
        raise ValueError(f"--num-layers {args.num_layers} must be a multiple of the {ranks} (virtual) pipeline stages")


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--num-layers", type=positive, default=4)
    add("--hidden-size", type=positive, default=256)
    add("--ffn-hidden-size", type=positive, help="default: 4 x hidden size, with --swiglu 8/3 x, in multiples of 64")
    add("--num-attention-heads", type=positive, default=4)
    add("--kv-channels", type=positive)
    add("--group-query-attention", action="store_true")
    add("--num-query-groups", type=positive)
    add("--seq-length", type=positive, default=1024)
    add("--max-position-embeddings", type=positive, help="default: the sequence length")
    add("--position-embedding-type", choices=["learned_absolute", "rope", "none"], default="learned_absolute")
    add("--rotary-base", type=positive, default=10000)
    add("--rotary-percent", type=float, default=1.0)
    add("--normalization", choices=["LayerNorm", "RMSNorm"], default="LayerNorm")
    add("--norm-epsilon", type=float, default=1e-5, dest="layernorm_epsilon")
    add("--swiglu", action="store_true")
    add("--disable-bias-linear", action="store_false", dest="add_bias_linear")
    add("--add-qkv-bias", action="store_true", default=None, dest="add_qkv_bias")
    add("--qk-layernorm", action="store_true")
    add("--untie-embeddings-and-output-weights", action="store_true")
    add("--attention-dropout", type=float, default=0.1)
    add("--hidden-dropout", type=float, default=0.1)
    add("--init-method-std", type=float, default=0.02)
    add("--multi-latent-attention", action="store_true")
    for name, default in (("q-lora-rank", 512), ("kv-lora-rank", 512), ("qk-head-dim", 128)):
        add(f"--{name}", type=positive, default=default, help="with --multi-latent-attention (default: %(default)s)")
    for name, default in (("qk-pos-emb-head-dim", 64), ("v-head-dim", 128)):
        add(f"--{name}", type=positive, default=default, help="with --multi-latent-attention (default: %(default)s)")
    add("--transformer-impl", choices=["local", "transformer_engine"], help="default: what this machine can run")
    add(
        "--vocab-size",
        type=positive,
        help="default: what the data's .json file says; 257 of the built-in text, 1024 of made-up tokens",
    )
    add("--make-vocab-size-divisible-by", type=positive, default=128)


def _add_moe(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("mixture of experts")
    add = group.add_argument
    add("--num-experts", type=positive, dest="num_moe_experts")
    add("--moe-layer-freq", type=_layer_frequency, help="N (every Nth layer), or a pattern such as '([0]*1+[1]*3)'")
    add("--moe-ffn-hidden-size", type=positive)
    add("--moe-router-topk", type=positive, default=2)
    balancing = ["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"]
    add("--moe-router-load-balancing-type", choices=balancing, default="aux_loss")
    add("--moe-aux-loss-coeff", type=float, default=0.0)
    add("--moe-z-loss-coeff", type=float)
    add("--moe-router-dtype", choices=["fp32", "fp64"])
    add("--moe-router-pre-softmax", action="store_true")
    add("--moe-grouped-gemm", action="store_true")
    add("--moe-permute-fusion", action="store_true")
    add("--moe-token-dispatcher-type", choices=["allgather", "alltoall", "flex"], default="allgather")
    add("--moe-shared-expert-intermediate-size", type=positive)
    add("--moe-shared-expert-overlap", action="store_true")
    add("--overlap-moe-expert-parallel-comm", action="store_true")
    add("--delay-wgrad-compute", action="store_true")


def _add_parallelism(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("parallelism")
    add = group.add_argument
    add("--tensor-model-parallel-size", type=positive, default=1)
    add("--pipeline-model-parallel-size", type=positive, default=1)
    add("--num-virtual-stages-per-pipeline-rank", type=positive)
    add("--pipeline-model-parallel-layout", help="such as 'Et|t|t|tL': embedding, layers, loss; gives virtual stages")
    add("--microbatch-group-size-per-virtual-pipeline-stage", type=positive, dest="microbatch_group_size_per_vp_stage")
    add("--expert-model-parallel-size", type=positive, default=1)
    add("--expert-tensor-parallel-size", type=positive)
    add("--context-parallel-size", type=positive, default=1)
    add("--sequence-parallel", action="store_true")
    add("--use-distributed-optimizer", action="store_true")
    add("--overlap-grad-reduce", action="store_true")


def _add_memory(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("precision and recomputation")
    add = group.add_argument
    add("--bf16", action="store_true")
    add("--recompute-granularity", choices=["selective", "full"])
    add("--recompute-method", choices=["uniform", "block"])
    add("--recompute-num-layers", type=positive)
    add("--recompute-modules", nargs="+", help="with selective recomputation (default: core_attn)")
    add("--no-gradient-accumulation-fusion", action="store_false", dest="gradient_accumulation_fusion", default=None)


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    add = group.add_argument
    add("--micro-batch-size", type=positive, default=1)
    add("--global-batch-size", type=positive, default=4)
    batch = ("START", "INCREMENT", "SAMPLES")
    add("--rampup-batch-size", type=positive, nargs=3, metavar=batch, help="grow the batch over the first samples")
    add("--train-iters", type=positive, default=10)
    add("--exit-interval", type=positive, help="end (and save) when the iteration is a multiple of this")
    add("--optimizer", choices=["adam", "sgd"], default="adam")
    add("--lr", type=float, default=1e-3)
    add("--min-lr", type=float, default=0.0)
    add("--lr-decay-style", choices=["constant", "linear", "cosine", "inverse-square-root"], default="linear")
    add("--lr-decay-iters", type=positive, help="default: the training iterations")
    add("--lr-warmup-iters", type=_non_negative, default=0)
    add("--weight-decay", type=float, default=0.01)
    add("--adam-beta1", type=float, default=0.9)
    add("--adam-beta2", type=float, default=0.999)
    add("--adam-eps", type=float, default=1e-8)
    add("--sgd-momentum", type=float, default=0.9)
    add("--clip-grad", type=float, default=1.0)
    add("--seed", type=int, default=1234)
    add("--deterministic-mode", action="store_true", help="choose deterministic kernels on GPUs; CPUs always are")
    add("--eval-interval", type=positive, help="evaluate every so many steps (default: never)")
    add("--eval-iters", type=positive, default=4, help="global batches per evaluation (default: %(default)s)")
    add("--eval-at-start", action="store_true", help="also evaluate before the first step")


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    add = group.add_argument
    add(
        "--data-path",
        nargs="+",
        metavar="PREFIX",
        help="a .bin/.idx pair without its suffix, or WEIGHT PREFIX pairs; default: Python's help topics",
    )
    add("--mock-data", action="store_true", help="made-up tokens instead of the built-in text")
    add("--split", default="900,100,0", help="shares of training, validation and test documents")
    add("--data-cache-path", type=Path, help="where dataset indices are kept (default: beside the data)")


def _add_checkpoints(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints")
    add = group.add_argument
    add("--save", type=Path, metavar="DIR", help="write checkpoints there: at the end, and every --save-interval steps")
    add("--save-interval", type=positive)
    add("--load", type=Path, metavar="DIR", help="go on from the latest checkpoint in DIR")


def _add_metrics(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("metrics")
    add = group.add_argument
    add("--log-interval", type=positive, default=1, help="steps between updates of the progress bar")
    add("--metrics-json", type=Path, metavar="FILE", help="one JSON object a step, with offload figures of all ranks")
    add("--timeline-json", type=Path, metavar="FILE", help="resident saved bytes over one step, of all ranks")
    add("--timeline-step", type=positive, help="which step (default: the second, or the last if there is one only)")


def positive(text: str) -> int:
    """Parse a flag's value that must be an integer above zero."""
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a positive whole number, got {text!r}")


def _non_negative(text: str) -> int:
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number, 0 or more, got {text!r}")


def _layer_frequency(text: str) -> int | list[int]:
    """Parse Megatron's pattern: an integer, or sums and products of lists, such as "([0]*1+[1]*3)"."""
    if text.isdigit():
        return positive(text)
    if not set(text) <= set("01()[]*+, 23456789"):
        raise argparse.ArgumentTypeError(f"expected an integer or a pattern such as '([0]*1+[1]*3)', got {text!r}")
    pattern = None
    with suppress(SyntaxError, TypeError):
        pattern = eval(text, {"__builtins__": {}})  # only digits, brackets, * and + get here
    if not isinstance(pattern, list) or not set(pattern) <= {0, 1}:
        raise argparse.ArgumentTypeError(f"a pattern is a list of 0 (dense) and 1 (experts), got {text!r}")
    return pattern
