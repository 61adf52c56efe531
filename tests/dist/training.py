# SPDX-License-Identifier: Apache-2.0
"""Training with the distributed optimizer: gradients are reduced during the backward, parameters gathered behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module

OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "use_distributed_optimizer": True}

T = TypeVar("T")


def train(
    config: Any, chunks: Sequence[torch.nn.Module], step: Callable[[list[Any]], T], num_steps: int = 3
) -> list[T]:
    """Run some steps of a model in bf16; return what each `step` of the wrapped chunks has returned."""
    wrapped = _wrap(config, chunks)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=0.01,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        overlap_param_gather=True,
    )
    optimizer = get_megatron_optimizer(settings, wrapped)
    config.grad_scale_func = optimizer.scale_loss
    steps = []
    for _ in range(num_steps):
        steps.append(step(wrapped))
        assert optimizer.step()[0]
    return steps


def _wrap(config: Any, chunks: Sequence[torch.nn.Module]) -> list[Any]:
    overlap = {**OVERLAP, "delay_wgrad_compute": True} if config.delay_wgrad_compute else OVERLAP
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, bucket_size=2000, **overlap)
    wrapped = [DistributedDataParallel(config, settings, Float16Module(config, chunk)) for chunk in chunks]
    config.finalize_model_grads_func = finalize_model_grads
    for name, function in (
        ("no_sync_func", "no_sync"),
        ("grad_sync_func", "start_grad_sync"),
        ("param_sync_func", "start_param_sync"),
    ):
        functions = [getattr(chunk, function) for chunk in wrapped]
        setattr(config, name, functions if len(functions) > 1 else functions[0])
    return wrapped
