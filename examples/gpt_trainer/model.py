# SPDX-License-Identifier: Apache-2.0
"""The model of this rank (one chunk per virtual stage), its optimizer and its learning-rate schedule."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import logging
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import Float16Module

from gpt_trainer.arguments import UsageError
from gpt_trainer.environment import num_virtual_stages

logger = logging.getLogger(__name__)


class ConfigError(UsageError):
    """Raised for flags that megatron-core rejects, or that the chosen implementation cannot run."""


def transformer_config(args: argparse.Namespace, device: torch.device) -> TransformerConfig:
    """Return megatron-core's configuration: every flag named like one of its fields, and the values derived from them.

    Raises:
        ConfigError: if flags are incompatible.
    """
    _check_implementation(args, transformer_impl(args, device), device)
    config_class = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    names = {field.name for field in dataclasses.fields(config_class)}
    values = {name: value for name, value in vars(args).items() if name in names and value is not None}
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    values.update(
        params_dtype=dtype,
        pipeline_dtype=dtype,
        virtual_pipeline_model_parallel_size=num_virtual_stages(args),
        deallocate_pipeline_outputs=True,
        **_schedule_settings(args),
        **_activation_settings(args),
        **_device_settings(args, device),
    )
    if args.multi_latent_attention:
        values["rope_type"] = "rope"
    if _implies_no_bias(args, device):
        values["add_bias_linear"] = False
        if dist.get_rank() == 0:
            logger.warning("experts of the local implementation have no bias: --disable-bias-linear is implied")
    try:
        return config_class(**values)
    except (AssertionError, ValueError) as error:
        raise ConfigError(str(error)) from error


def _implies_no_bias(args: argparse.Namespace, device: torch.device) -> bool:
    is_local = transformer_impl(args, device) == "local"
    return is_local and args.num_moe_experts is not None and args.add_bias_linear


def _check_implementation(args: argparse.Namespace, implementation: str, device: torch.device) -> None:
    if implementation != "local":
        if device.type != "cuda":
            raise ConfigError(f"--transformer-impl {implementation} needs a GPU: leave it out, or say local")
        return
    needs_te = ("sequence_parallel", "multi_latent_attention", "moe_grouped_gemm", "moe_permute_fusion",
                "delay_wgrad_compute")  # fmt: skip
    wanted = [name for name in needs_te if getattr(args, name)]
    if args.context_parallel_size > 1:
        wanted.append("context_parallel_size")
    if wanted:
        flag = wanted[0].replace("_", "-")
        raise ConfigError(f"--{flag} needs --transformer-impl transformer_engine, and that a GPU")
    if "mlp" in (args.recompute_modules or ()) and args.add_bias_linear:
        # megatron-core's checkpoint makes the returned bias part of its own graph, and never returns
        raise ConfigError("--recompute-modules mlp needs --disable-bias-linear with the local implementation")


def _schedule_settings(args: argparse.Namespace) -> dict[str, Any]:
    # As in Megatron-LM: the interleaved schedule overlaps its sends and receives, the others batch them.
    is_interleaved = num_virtual_stages(args) is not None
    return {"overlap_p2p_comm": is_interleaved, "batch_p2p_comm": not is_interleaved}


def _activation_settings(args: argparse.Namespace) -> dict[str, Any]:
    if not args.swiglu:
        return {}
    ffn_hidden_size = args.ffn_hidden_size or int(args.hidden_size * 4 * 2 / 3 / 64) * 64 or 64
    return {"gated_linear_unit": True, "activation_func": F.silu, "ffn_hidden_size": ffn_hidden_size}


def _device_settings(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        has_apex = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
        fusion = args.gradient_accumulation_fusion
        return {
            "gradient_accumulation_fusion": has_apex if fusion is None else fusion,
            "bias_dropout_fusion": True,
            "masked_softmax_fusion": False,
        }
    # The fused kernels are compiled for GPUs; on a CPU their compilation would take longer than a small run.
    return {
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }


def transformer_impl(args: argparse.Namespace, device: torch.device) -> str:
    """Return the implementation given, or TransformerEngine if it is installed and there is a GPU, else megatron's."""
    if args.transformer_impl is not None:
        return args.transformer_impl
    has_te = importlib.util.find_spec("transformer_engine") is not None
    return "transformer_engine" if device.type == "cuda" and has_te else "local"


def build_chunks(
    args: argparse.Namespace, config: TransformerConfig, device: torch.device, vocab_size: int
) -> list[DistributedDataParallel]:
    """Build this rank's model chunks, one per virtual stage, wrapped for data parallelism."""
    num_stages = num_virtual_stages(args)
    stages = [None] if num_stages is None else range(num_stages)
    chunks = [_build_chunk(args, config, device, vocab_size, stage) for stage in stages]
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.bf16,
        overlap_grad_reduce=args.overlap_grad_reduce,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
    # Buckets hide the reduction behind the backward; after the first chunk there is nothing left to hide it behind.
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    _set_gradient_hooks(args, config, wrapped)
    return wrapped


def _build_chunk(
    args: argparse.Namespace, config: TransformerConfig, device: torch.device, vocab_size: int, vp_stage: int | None
) -> torch.nn.Module:
    model = GPTModel(
        config,
        _layer_spec(args, config, device, vp_stage),
        vocab_size=padded_vocab_size(args, vocab_size),
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
    )
    model.model_type = ModelType.encoder_or_decoder
    model = model.to(device)
    return Float16Module(config, model) if args.bf16 else model


def _layer_spec(args: argparse.Namespace, config: TransformerConfig, device: torch.device, vp_stage: int | None) -> Any:
    use_te = transformer_impl(args, device) == "transformer_engine"
    if config.num_moe_experts is not None:
        return get_gpt_decoder_block_spec(config, use_te, normalization=args.normalization, vp_stage=vp_stage)
    common = {"qk_layernorm": args.qk_layernorm, "multi_latent_attention": args.multi_latent_attention}
    if use_te:
        return get_gpt_layer_with_transformer_engine_spec(**common)
    return get_gpt_layer_local_spec(normalization=args.normalization, **common)


def padded_vocab_size(args: argparse.Namespace, vocab_size: int) -> int:
    """Round the vocabulary up so that every tensor-parallel rank gets an equal, aligned share."""
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple


def _set_gradient_hooks(
    args: argparse.Namespace, config: TransformerConfig, chunks: list[DistributedDataParallel]
) -> None:
    config.finalize_model_grads_func = finalize_model_grads
    if not args.overlap_grad_reduce:
        return
    no_sync = [chunk.no_sync for chunk in chunks]
    start_sync = [chunk.start_grad_sync for chunk in chunks]
    is_single = len(chunks) == 1
    config.no_sync_func = no_sync[0] if is_single else no_sync
    config.grad_sync_func = start_sync[0] if is_single else start_sync


def build_optimizer(args: argparse.Namespace, chunks: list[DistributedDataParallel]) -> MegatronOptimizer:
    """Build megatron-core's optimizer over all chunks of this rank."""
    config = OptimizerConfig(
        optimizer=args.optimizer,
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        sgd_momentum=args.sgd_momentum,
        bf16=args.bf16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        use_distributed_optimizer=args.use_distributed_optimizer,
        clip_grad=args.clip_grad,
    )
    optimizer = get_megatron_optimizer(config, chunks)
    chunks[0].config.grad_scale_func = optimizer.scale_loss
    return optimizer


def build_scheduler(args: argparse.Namespace, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Build the schedule of learning rate and weight decay by the number of samples seen."""
    decay_iters = args.lr_decay_iters or args.train_iters
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * args.global_batch_size,
        lr_decay_steps=decay_iters * args.global_batch_size,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters * args.global_batch_size,
        wd_incr_style="constant",
    )
