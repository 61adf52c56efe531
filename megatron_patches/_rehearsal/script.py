# SPDX-License-Identifier: Apache-2.0
"""Reads what a training script would train from its command line, without running it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from megatron_patches._arguments import Settings, config_rows, resolve
from megatron_patches._command_line import OneLineParser
from megatron_patches._flags import SETTINGS
from megatron_patches._rehearsal.building import one_process_of_many
from megatron_patches._rehearsal.job import TrainingJob
from megatron_patches._rows.registry import Patch, apply_patches
from megatron_patches._take_over import TakeOver
from offload_engine import OffloadConfig

_TRAINER = "gpt_trainer"
_TRAINING = "megatron.training"
_FP32_BYTES = 4
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_distributed_optimizer_instances",
)
_OWN_OFFLOAD = ("fine_grained_activation_offloading", "cpu_offloading")
_SWITCHED_OFF = (
    *_OWN_OFFLOAD,
    "perform_initialization",
    "use_cpu_initialization",
    "gradient_accumulation_fusion",
    "moe_permute_fusion",
    "moe_router_fusion",
)
"""Settings that need contents, or kernels that are not rehearsed; and megatron-core's own offload."""
_NO_OFFLOAD = Settings(OffloadConfig(), ())
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_NOT_REHEARSED = {
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "mtp_num_layers": "--mtp-num-layers",
    "spec": "--spec",
    "experimental_attention_variant": "--experimental-attention-variant",
    "heterogeneous_layers_config_path": "--heterogeneous-layers-config-path",
    "heterogeneous_layers_config_encoded_json": "--heterogeneous-layers-config-encoded-json",
    "hybrid_layer_pattern": "--hybrid-layer-pattern",
    "hybrid_override_pattern": "--hybrid-override-pattern",
    "te_precision_config_file": "--te-precision-config-file",
    "use_checkpoint_args": "--use-checkpoint-args",
    "freeze_all_layers": "--freeze-all-layers",
    "perform_rl_step": "--perform-rl-step",
    "cuda_graph_impl": "--cuda-graph-impl",
    "use_torch_fsdp2": "--use-torch-fsdp2",
    "use_megatron_fsdp": "--use-megatron-fsdp",
    "optimizer_cpu_offload": "--optimizer-cpu-offload",
    "use_precision_aware_optimizer": "--use-precision-aware-optimizer",
}
"""Parsed arguments that make another model or keep other state."""
_OFF = (None, False, "none")


class ScriptError(Exception):
    """Raised if the command line of a script cannot be read; the message is one line."""


def read_job(script: Sequence[str], world_size: int, defaults: Settings = _NO_OFFLOAD) -> TrainingJob:
    """Read the job of a script: its path and its arguments.

    The arguments of examples/pretrain_gpt.py are read by its own parser, those of every other script by Megatron-LM's.
    As on GPUs, TransformerEngine is assumed to be installed unless the arguments say local.

    Args:
        script: its path, and its arguments.
        world_size: number of GPUs.
        defaults: settings of the flags before the script.

    Raises:
        ScriptError: if the arguments cannot be read, or contradict each other or the number of GPUs.
    """
    path, *arguments = script
    read = _read_trainers if (Path(path).parent / _TRAINER / "arguments.py").is_file() else _read_megatrons
    take_over = TakeOver(defaults.is_taken_over)
    try:
        # As in a run: the fields of the configuration are the flags that Megatron-LM's parser gets.
        with apply_patches(config_rows(take_over, is_on_by_default=defaults.is_on)):
            job, make_config = read(path, arguments, world_size)
            with one_process_of_many(0, world_size):
                settings = _offload_of(make_config(), defaults)
    except (AssertionError, ValueError, TypeError, RuntimeError) as error:
        raise ScriptError(f"{path}: {error}") from error
    return dataclasses.replace(job, make_config=_maker(make_config), settings=settings)


def _offload_of(config: Any, defaults: Settings) -> Settings:
    """Return the settings with which a run of this configuration would offload.

    Raises:
        ValueError: for settings that a run refuses, or that are not rehearsed.
    """
    settings = resolve(config, defaults) or defaults
    own = [name for name in _OWN_OFFLOAD if getattr(config, name, False)]
    if own:
        raise ValueError(f"{own[0]} is megatron-core's own, which is not rehearsed: give --offload-engine as well")
    if settings.engine.directory is not None:
        raise ValueError(f"offload_dir={settings.engine.directory} is for a run without a GPU: omit it")
    if config.recompute_granularity == "full" and "layer_input" in settings.modules:
        raise ValueError(
            "offload_modules has 'layer_input', and --plan rehearses offload without recompute_granularity='full': "
            "omit one of the two"
        )
    engine = settings.engine.replace(dry_run=False, cpu_affinity=False)
    return settings._replace(engine=engine, trace=None, has_report=False, plan=None, plan_plot=None)


_Read = tuple[TrainingJob, Callable[[], Any]]


def _read_trainers(path: str, arguments: Sequence[str], world_size: int) -> _Read:
    with _importable(os.path.dirname(os.path.abspath(path))):
        args = importlib.import_module(f"{_TRAINER}.arguments").parse_arguments(arguments)
        model = importlib.import_module(f"{_TRAINER}.model")
        stages = importlib.import_module(f"{_TRAINER}.environment").num_virtual_stages(args)
    if args.vocab_size is None:
        raise ScriptError(f"{path}: without its data the vocabulary is not known: add --vocab-size")
    args.transformer_impl = args.transformer_impl or "transformer_engine"
    args.virtual_pipeline_model_parallel_size = stages
    args.padded_vocab_size = model.padded_vocab_size(args, args.vocab_size)
    args.accumulate_allreduce_grads_in_fp32 = args.bf16
    make_config = functools.partial(model.transformer_config, args, torch.device("cuda"))
    return _make_job(args, make_config, world_size), make_config


def _read_megatrons(path: str, arguments: Sequence[str], world_size: int) -> _Read:
    try:
        reader: Any = importlib.import_module(f"{_TRAINING}.arguments")
    except ImportError as error:
        raise ScriptError(
            f"the arguments of {path} cannot be read: it is not examples/pretrain_gpt.py, and {_TRAINING} cannot be "
            f"imported ({error}). Run this where Megatron-LM is installed"
        ) from error
    with _command_line([path, *arguments], world_size), _imagined_gpu(), contextlib.redirect_stdout(io.StringIO()):
        args = reader.parse_args(_ScriptParser.of)
        _check_is_rehearsed(args)
        args = reader.validate_args(args) or args
    if getattr(args, "vocab_size", None) is None and getattr(args, "padded_vocab_size", None) is None:
        raise ScriptError(f"{path}: without its tokenizer the vocabulary is not known: add --vocab-size")
    if getattr(args, "padded_vocab_size", None) is None:
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
    make_config = functools.partial(reader.core_transformer_config_from_args, args)
    return _make_job(args, make_config, world_size), make_config


def _check_is_rehearsed(args: argparse.Namespace) -> None:
    given = [flag for name, flag in _NOT_REHEARSED.items() if getattr(args, name, None) not in _OFF]
    if given:
        raise ValueError(f"--plan does not rehearse {', '.join(given)}: omit it for a forecast without it")


class _ScriptParser(OneLineParser):
    """Megatron-LM's parser, which reports mistakes in one line."""

    @classmethod
    def of(cls, parser: argparse.ArgumentParser) -> _ScriptParser:
        """Return a parser with all that `parser` has."""
        return cls(parents=[parser], add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise `ScriptError`."""
        if message.startswith("unrecognized"):
            message += "; flags that the script itself adds cannot be read before it runs: omit them"
        raise ScriptError(f"{self.prog}: {message}")


def _make_job(args: argparse.Namespace, make_config: Callable[[], Any], world_size: int) -> TrainingJob:
    parallel = {name: value for name in _SIZES if (value := getattr(args, name, None)) is not None}
    replica = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    if world_size % replica:
        raise ValueError(
            f"{world_size} GPUs cannot be divided among model replicas of {replica} (tensor x pipeline x context "
            "parallel size); --nodes and the number after the hardware's name say how many GPUs there are"
        )
    samples = args.micro_batch_size * (world_size // replica)
    if args.global_batch_size % samples:
        raise ValueError(
            f"--global-batch-size {args.global_batch_size} is not a multiple of {samples}, the microbatches of "
            f"{world_size // replica} replicas"
        )
    is_adam = args.optimizer == "adam"
    has_master = bool(args.bf16 or getattr(args, "fp16", False))
    return TrainingJob(
        make_config=make_config,
        vocab_size=args.padded_vocab_size,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        num_microbatches=args.global_batch_size // samples,
        world_size=world_size,
        has_te=args.transformer_impl != "local",
        model={
            "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
            "position_embedding_type": args.position_embedding_type,
            "rotary_percent": args.rotary_percent,
            "rotary_base": args.rotary_base,
            "fp16_lm_cross_entropy": bool(getattr(args, "fp16_lm_cross_entropy", False)),
        },
        spec={"qk_layernorm": args.qk_layernorm, "multi_latent_attention": args.multi_latent_attention},
        keeps_fp32_gradients=bool(args.accumulate_allreduce_grads_in_fp32),
        distributes_optimizer=args.use_distributed_optimizer,
        optimizer_bytes=_FP32_BYTES * (int(has_master) + (2 if is_adam else 1)),
        parallel=parallel,
        has_experts=bool(getattr(args, "num_moe_experts", None) or getattr(args, "num_experts", None)),
        recomputes_all=args.recompute_granularity == "full",
    )


def _maker(make_config: Callable[[], Any]) -> Callable[..., Any]:
    """Return a function that makes a configuration with changed fields, none of which needs a GPU or contents."""

    def make(**changes: Any) -> Any:
        config = make_config()
        without = {setting.name: setting.default for setting in SETTINGS}
        for name, value in {**dict.fromkeys(_SWITCHED_OFF, False), **without, **changes}.items():
            if hasattr(config, name):
                setattr(config, name, value)
        return config

    return make


@contextlib.contextmanager
def _importable(folder: str) -> Iterator[None]:
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _imagined_gpu() -> contextlib.AbstractContextManager[object]:
    """Return a context manager under which Megatron-LM's checks find a GPU."""
    why = "the arguments are checked for the GPU that this machine has"
    properties = argparse.Namespace(major=9, minor=0)
    answers: dict[str, Any] = {
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "device_count": 1,
        "current_device": 0,
    }
    rows = [
        Patch(target=f"torch.cuda:{name}", wrapper=functools.partial(_answering, answer), why=why)
        for name, answer in answers.items()
    ]
    return apply_patches(rows)


def _answering(answer: Any, original: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer


@contextlib.contextmanager
def _command_line(words: Sequence[str], world_size: int) -> Iterator[None]:
    """Set what Megatron-LM reads from a process."""
    argv, sys.argv = sys.argv, list(words)
    own = {"RANK": "0", "WORLD_SIZE": str(world_size)}
    own[_CONNECTIONS] = os.environ.get(_CONNECTIONS, "1")  # required of runs on GPUs before Blackwell
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        sys.argv = argv
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
