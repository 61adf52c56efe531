# SPDX-License-Identifier: Apache-2.0
"""Builds the chunks of one rank, and their wrappers, without the other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_patches._rehearsal.job import TrainingJob
from megatron_patches._rehearsal.modules import RehearsedGroupedLinear

WORKSPACE_BYTES = 32 << 20
"""Workspace of cuBLAS on Hopper."""
_NUM_STREAMS = 4
"""Streams of a product of groups; each has a workspace. (128 MiB more in all steps with experts on H200s.)"""


def build_chunk(job: TrainingJob, config: Any, vp_stage: int | None) -> torch.nn.Module:
    """Build a chunk of the model."""
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt.gpt_model import GPTModel

    ends = {"ignore_virtual": False, "vp_stage": vp_stage}
    chunk = GPTModel(
        config,
        _layer_spec(job, config, vp_stage),
        vocab_size=job.vocab_size,
        max_sequence_length=job.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(**ends),
        post_process=parallel_state.is_pipeline_last_stage(**ends),
        vp_stage=vp_stage,
        **job.model,
    )
    chunk.model_type = ModelType.encoder_or_decoder
    return chunk.to(config.params_dtype)


def _layer_spec(job: TrainingJob, config: Any, vp_stage: int | None) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs as specs

    if config.num_moe_experts is not None:
        return specs.get_gpt_decoder_block_spec(
            config, job.has_te, normalization=config.normalization, vp_stage=vp_stage
        )
    if job.has_te:
        return specs.get_gpt_layer_with_transformer_engine_spec(**job.spec)
    return specs.get_gpt_layer_local_spec(normalization=config.normalization, **job.spec)


def with_gradients(job: TrainingJob, config: Any, chunk: torch.nn.Module, is_behind: bool) -> Any:
    """Return the chunk as the schedule gets it: in DistributedDataParallel, which keeps gradients, if the job has it.

    Args:
        job: job of the model.
        config: the model's.
        chunk: chunk without wrappers.
        is_behind: other chunks of the rank come before it.
    """
    if not job.has_data_parallelism:
        return chunk
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=job.keeps_fp32_gradients, use_distributed_optimizer=job.distributes_optimizer
    )
    inner = Float16Module(config, chunk) if config.bf16 or config.fp16 else chunk
    return DistributedDataParallel(config, settings, inner, disable_bucketing=is_behind)


def workspace_bytes(job: TrainingJob, chunks: Sequence[Any]) -> int:
    """Return the bytes of permanent workspaces of matrix products.

    TransformerEngine has one, and more for experts, which it computes on several streams; torch has its own for logits.
    """
    has_logits = any(chunk.post_process for chunk in chunks)
    has_grouped = any(isinstance(module, RehearsedGroupedLinear) for chunk in chunks for module in chunk.modules())
    by_te = 1 + (_NUM_STREAMS if has_grouped else 0) if job.has_te else 0
    return WORKSPACE_BYTES * (by_te + (2 if has_logits or not job.has_te else 0))


def virtual_stages(config: Any) -> list[int | None]:
    """Return the virtual stages of a rank; None for one without."""
    number = config.virtual_pipeline_model_parallel_size
    return [None] if number is None else list(range(number))


def data_parallel_size() -> int:
    """Return the number of ranks over which an optimizer is distributed."""
    from megatron.core import parallel_state

    return int(parallel_state.get_data_parallel_world_size(with_context_parallel=True, partial_data_parallel=True))


@contextlib.contextmanager
def one_rank_of_many(job: TrainingJob, rank: int) -> Iterator[None]:
    """Set up parallel state as the first process of a pipeline rank sees it; no other process exists."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    size = job.parallel.get("pipeline_model_parallel_size", 1)
    with one_process_of_many(rank * (job.world_size // size), job.world_size):
        try:
            parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **job.parallel)
            model_parallel_cuda_manual_seed(1)
            yield
        finally:
            parallel_state.destroy_model_parallel()


@contextlib.contextmanager
def one_process_of_many(rank: int, world_size: int) -> Iterator[None]:
    """Set up a process group whose other processes do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
