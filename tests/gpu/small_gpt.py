# SPDX-License-Identifier: Apache-2.0
"""A small GPT of TransformerEngine's layers on this rank's GPU, or a part of it, and steps of it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from tests.dist.tiny import fingerprint, mean_loss, of_this_rank
from tests.dist.tiny import run as run_step
from tests.gpu.parity import Bits

VOCABULARY, SEQUENCE, MICRO_BATCH, HIDDEN = 256, 512, 2, 256
DEVICE = "cuda"


def make_config(**overrides: Any) -> TransformerConfig:
    """Make a configuration for the parallel state of this process; `num_moe_experts` experts in every layer, or none.

    Args:
        overrides: of the settings below.
    """
    virtual = ps.get_virtual_pipeline_model_parallel_world_size()
    experts = dict(
        moe_router_topk=2,
        moe_grouped_gemm=True,
        moe_ffn_hidden_size=HIDDEN,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
    )
    settings: dict[str, Any] = dict(
        num_layers=2 * (virtual or 1) * ps.get_pipeline_model_parallel_world_size(),
        hidden_size=HIDDEN,
        ffn_hidden_size=2 * HIDDEN,
        num_attention_heads=4,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        autocast_dtype=torch.bfloat16,
        pipeline_model_parallel_size=ps.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=virtual,
        overlap_p2p_comm=virtual is not None,
        batch_p2p_comm=virtual is None,
        deallocate_pipeline_outputs=True,
        tensor_model_parallel_size=ps.get_tensor_model_parallel_world_size(),
        context_parallel_size=ps.get_context_parallel_world_size(),
        expert_model_parallel_size=ps.get_expert_model_parallel_world_size(),
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=True,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        deterministic_mode=True,
        **(experts if overrides.get("num_moe_experts") else {}),
    )
    is_latent = overrides.get("multi_latent_attention")
    return (MLATransformerConfig if is_latent else TransformerConfig)(**{**settings, **overrides})


def make_chunks(config: TransformerConfig) -> list[GPTModel]:
    """Return this rank's model chunks, one for each virtual stage, with the same weights every time."""
    torch.manual_seed(1 + ps.get_pipeline_model_parallel_rank())
    # Generators that a capture can register; another model begins with a tracker of its own kind.
    captures = {"te_rng_tracker": "transformer_engine", "use_cudagraphable_rng": "full_iteration"}
    trackers = {name: config.cuda_graph_impl == value for name, value in captures.items()}
    model_parallel_cuda_manual_seed(1, **trackers, force_reset_rng=True)
    num_stages = config.virtual_pipeline_model_parallel_size
    return [_make_chunk(config, stage) for stage in (range(num_stages) if num_stages else [None])]


def _make_chunk(config: TransformerConfig, stage: int | None) -> torch.nn.Module:
    common: dict[str, Any] = dict(
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        vp_stage=stage,
    )
    chunk = _hybrid(config, common) if config.is_hybrid_model else _gpt(config, common)
    chunk.model_type = ModelType.encoder_or_decoder
    return chunk.to(DEVICE, torch.bfloat16)


def _gpt(config: TransformerConfig, common: dict[str, Any]) -> torch.nn.Module:
    stage = {"vp_stage": common["vp_stage"]}
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True, **stage)
    if config.mtp_num_layers:
        common["mtp_block_spec"] = gpt_layer_specs.get_gpt_mtp_block_spec(
            config, spec, use_transformer_engine=True, **stage
        )
    return GPTModel(config, spec, **common)


def _hybrid(config: TransformerConfig, common: dict[str, Any]) -> torch.nn.Module:
    """Layers of one kind each, in turns; some of them Mamba layers where `mamba_num_heads` is set."""
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    layers = "M*-E" if config.mamba_num_heads else "*-*E"
    pattern = (layers * config.num_layers)[: config.num_layers]
    model = HybridModel(config, hybrid_stack_spec, hybrid_layer_pattern=pattern, **common)
    # causal_conv1d sums these gradients with atomics, whatever PyTorch is told: two runs would differ without offload.
    for name, parameter in model.named_parameters():
        if ".conv1d_" in name:
            parameter.requires_grad_(False)
    return model


def keep_gradients(chunks: list[GPTModel]) -> None:
    """Give every parameter a gradient for good, which the next steps set to zero in its place."""
    for chunk in chunks:
        grads = [torch.zeros_like(parameter) for parameter in chunk.parameters()]
        for parameter, grad in zip(chunk.parameters(), grads, strict=True):
            parameter.grad = grad
        chunk.zero_grad_buffer = partial(torch._foreach_zero_, grads)


def run(
    chunks: list[torch.nn.Module], num_microbatches: int, *, schedule: Callable[..., Any] | None = None
) -> list[float]:
    """Run one forward and backward of all microbatches, by `schedule` if there is one; return this rank's losses."""
    sizes: dict[str, Any] = {"seq_length": SEQUENCE, "micro_batch_size": MICRO_BATCH}
    return run_step(chunks, num_microbatches, schedule=schedule, make_batches=_batches, forward_step=_forward, **sizes)


def fingerprint_of_step(chunks: list[Any], num_microbatches: int) -> dict[str, str]:
    """Run one step; return its fingerprint."""
    return fingerprint(chunks, run(chunks, num_microbatches))


def steps(
    chunks: list[Any],
    microbatches: Sequence[int],
    step: Callable[[list[Any], int], dict[str, str]] = fingerprint_of_step,
) -> tuple[Bits, int]:
    """Run steps; return their bits, and the peak of allocated memory in the last, above what the model has before all.

    Not above what is there before the last: a schedule may leave graphs of a step behind, until the next one. The
    collector of garbage runs between steps only, else when it runs would decide about the peak.
    """
    gc.collect()
    before = torch.cuda.memory_allocated()
    bits = []
    for number in microbatches:
        gc.collect()
        gc.disable()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        try:
            bits.append(step(chunks, number))
        finally:
            gc.enable()
    torch.cuda.synchronize()
    return bits, torch.cuda.max_memory_allocated() - before


def _batches(num_microbatches: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(7 + ps.get_data_parallel_rank())
    for _ in range(num_microbatches):
        yield torch.randint(0, VOCABULARY, (MICRO_BATCH, SEQUENCE), generator=generator).to(DEVICE)


def _forward(batches: Iterator[torch.Tensor], model: Any, return_schedule_plan: bool = False) -> Any:
    tokens = next(batches)
    forward = model.build_schedule_plan if return_schedule_plan else model  # under the all-to-all overlap
    positions = torch.arange(SEQUENCE, device=DEVICE)[None].expand_as(tokens).contiguous()
    batch = of_this_rank(tokens=tokens, positions=positions, labels=tokens.roll(-1, dims=1))
    return forward(batch["tokens"], batch["positions"], None, labels=batch["labels"]), partial(mean_loss)
