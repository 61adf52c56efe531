# SPDX-License-Identifier: Apache-2.0
"""Checks captures of whole steps by megatron-core, and releases them."""

from __future__ import annotations

from typing import Any

from offload_engine import OffloadEngine, OffloadError

_LEAST_WARMUP = 3  # the first step pins host memory, the second makes the plan, the third hands over its recording


def check_whole_step(config: Any, has_budget: bool) -> None:
    """Check a configuration whose steps are captured as a whole.

    Raises:
        NotImplementedError: if a setting excludes that; names both, and what to do.
    """
    steps = getattr(config, "cuda_graph_warmup_steps", _LEAST_WARMUP)
    if steps < _LEAST_WARMUP:
        raise NotImplementedError(
            f"offload_activation beside cuda_graph_warmup_steps={steps}: the eager steps before a capture pin host "
            f"memory and make the plan. Set it to {_LEAST_WARMUP} or more"
        )
    if has_budget:
        raise NotImplementedError(
            "offload_gpu_budget beside a capture of whole steps: a budget measures steps and changes what stays, and a "
            "graph cannot change. Name offload_modules instead, or omit one of the two"
        )
    if getattr(config, "moe_expert_rank_capacity_factor", None) is not None:
        raise NotImplementedError(
            "offload_activation beside a capture of whole steps and moe_expert_rank_capacity_factor, whose runner "
            "repeats steps in which experts overflow: omit one of the three"
        )


def release_captured(engine: OffloadEngine) -> None:
    """Release captured steps and layers whose graphs have been reset or freed.

    Raises:
        OffloadError: if megatron-core still has a graph.
    """
    engine.graphs.check_layers_released()
    steps = engine.graphs.steps
    if not steps:
        return
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper

    if FullCudaGraphWrapper.cuda_graph["training"] is not None:
        raise OffloadError(
            "FullCudaGraphWrapper still has the graph of a training step, whose replays copy to and from "
            f"{sum(step.host_bytes for step in steps):,} bytes of the engine's host memory: call its "
            "reset_cuda_graph('training') first"
        )
    for step in steps:
        step.release()
