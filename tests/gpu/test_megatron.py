# SPDX-License-Identifier: Apache-2.0
"""megatron-core's parallelism over NCCL, with TransformerEngine's layers: the same bits with and without offload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from operator import eq
from typing import Any

import pytest
import torch

from tests.dist.launch import Pipeline
from tests.gpu.parity import RELEASED_AT_ONCE, check_bits, check_moved, deterministic_algorithms, run_twice
from tests.gpu.ranks import GpuRanks

DENSE = ["qkv_linear", "core_attn", "attn_proj", "mlp_fc1", "mlp_act", "mlp_fc2"]
EXPERTS = ["core_attn", "attn_proj", "mlp_norm", "router", "dispatched_tokens", "moe_act", "router_fc2"]
OVERLAP = {"overlap_moe_expert_parallel_comm": True}
FLEX = {"moe_token_dispatcher_type": "flex", "moe_router_dtype": "fp32"}


FEW, MANY = {"num_moe_experts": 4}, {"num_moe_experts": 8}
# The layout of the published results: data parallel 4, expert parallel 4, pipelines of 2 with 2 virtual stages.
EIGHT = Pipeline(2, 2, expert=4)
ROWS: dict[str, tuple[int, Pipeline, list[str], dict[str, Any]]] = {
    "context": (2, Pipeline(context=2), DENSE, {}),
    "tensor and sequence": (2, Pipeline(tensor=2), DENSE, {"sequence_parallel": True}),
    "data": (2, Pipeline(), DENSE, {}),
    "fused weight gradients": (2, Pipeline(), DENSE, {"gradient_accumulation_fusion": True}),
    "experts": (2, Pipeline(expert=2), EXPERTS, FEW),
    "experts and context": (2, Pipeline(expert=2, context=2), EXPERTS, FEW),
    "interleaved": (8, Pipeline(2, 2), DENSE, {}),
    "interleaved, experts": (8, EIGHT, EXPERTS, MANY),
    "interleaved, overlap": (8, EIGHT, EXPERTS, {**MANY, **OVERLAP}),
    "interleaved, delayed": (8, EIGHT, EXPERTS, {**MANY, **OVERLAP, "delay_wgrad_compute": True}),
}


@pytest.mark.parametrize("row", ROWS)
def test_three_steps_of_the_distributed_optimizer(row: str, ranks_of: Callable[[int], GpuRanks]) -> None:
    """Gradients are reduced during the backward, and parameters gathered during the next forward."""
    num_ranks, shape, *job = ROWS[row]
    ranks_of(num_ranks).run(_check_steps, *job, shape=shape)


@pytest.mark.parametrize(
    "overlap", [{}, OVERLAP, {**OVERLAP, "delay_wgrad_compute": True}], ids=["", "overlap", "delayed"]
)
def test_flex_dispatcher(overlap: dict[str, Any], ranks_of: Callable[[int], GpuRanks]) -> None:
    """DeepEP's kernels, which reach into the other GPU."""
    if find_spec("deep_ep") is None:
        pytest.skip("needs deep_ep, which is not installed")
    if (num_gpus := torch.cuda.device_count()) < 2:
        pytest.skip(f"needs 2 GPUs of one machine, there are {num_gpus}")
    settings = {"num_moe_experts": 4, **FLEX, **overlap}
    ranks_of(2).run(_check_steps, EXPERTS, settings, shape=Pipeline(expert=2))


def _check_steps(names: Sequence[str], settings: dict[str, Any]) -> None:
    from megatron_patches import apply

    with deterministic_algorithms(warn_only=True), _kernels_of_apex(settings):
        expected = run_twice(lambda: _train(settings), eq)
        with apply(RELEASED_AT_ONCE) as handle:
            got = _train({**settings, "offload_activation": True, "offload_modules": list(names)})
            check_moved(handle.stats)
    assert expected[0] != expected[-1], "nothing was learned"
    check_bits(expected, got)


def _kernels_of_apex(settings: dict[str, Any]) -> AbstractContextManager[object]:
    """Where megatron-core's own linear layers ask for them and apex is not installed, a function of the tests."""
    if not settings.get("gradient_accumulation_fusion") or find_spec("fused_weight_gradient_mlp_cuda"):
        return nullcontext()
    from tests.dist.test_weights import kernels

    return kernels()


def _train(settings: dict[str, Any]) -> list[dict[str, str]]:
    from tests.dist.tiny import train_distributed
    from tests.gpu.small_gpt import fingerprint_of_step, make_chunks, make_config

    config = make_config(**settings)
    num_microbatches = 2 * config.pipeline_model_parallel_size
    return train_distributed(config, make_chunks(config), lambda chunks: fingerprint_of_step(chunks, num_microbatches))
