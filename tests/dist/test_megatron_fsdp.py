# SPDX-License-Identifier: Apache-2.0
"""Model chunks sharded by Megatron-FSDP (`--use-megatron-fsdp`): the same numbers, and weights never move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("einops", reason="Megatron-FSDP arranges its ranks with it")

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megatron_patches import apply
from megatron_patches._versions import installed_version, is_in_range
from offload_engine import IterationStats
from offload_engine._devices.cpu import CpuDevice
from tests.dist.launch import Pipeline, run_ranks
from tests.dist.megatron_fsdp import (
    SHARDED,
    STRATEGIES,
    Job,
    Sharding,
    check_parity,
    make_job,
    noting_moved_weights,
    step,
)
from tests.dist.tiny import ALL, make_chunks, make_config, run, step

DENSE = ["layer_input", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2"]
MOE = ["layer_input", "core_attn", "router", "dispatched_tokens", "router_fc1", "moe_act", "router_fc2"]
NAMES = {"dense": DENSE, "moe": MOE, "mixed": [*MOE, "mlp_fc1", "mlp_act", "mlp_fc2"]}
EXPERTS: dict[str, Any] = {"expert_model_parallel_size": 2}
OVERLAP: dict[str, Any] = {
    **EXPERTS,
    "overlap_moe_expert_parallel_comm": True,
    "moe_shared_expert_intermediate_size": 32,
}
HYBRID = {"num_distributed_optimizer_instances": 2}
RECOMPUTED: dict[str, dict[str, Any]] = {
    "layer_input": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    "attn_norm": dict(recompute_granularity="selective", recompute_modules=["layernorm"]),
    "mlp_norm": dict(recompute_granularity="selective", recompute_modules=["layernorm", "mlp"], add_bias_linear=False),
}
has_overlap = pytest.mark.skipif(
    not is_in_range(installed_version() or "0", ">=0.19"), reason="Megatron-FSDP runs under the overlap from 0.19 on"
)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_losses_and_gradients_are_equal_to_the_last_bit(kind: str, strategy: str) -> None:
    run_ranks(_check_as_without, Job(kind, Sharding(strategy)), NAMES[kind], world_size=2)


@pytest.mark.parametrize(
    "option",
    ["fsdp_double_buffer", "megatron_fsdp_max_pool_double_buffer", "megatron_fsdp_enable_fine_grained_param_gather"],
)
def test_buffers_that_take_turns_and_weights_gathered_module_by_module(option: str) -> None:
    run_ranks(_check_as_without, Job("dense", Sharding(options={option: True})), DENSE, world_size=2)


@pytest.mark.parametrize("outer", ["no_shard", "optim"])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_hybrid_sharding(kind: str, outer: str) -> None:
    sharding = Sharding(options={**HYBRID, "outer_dp_sharding_strategy": outer})
    has_experts = kind == "moe" and outer == "no_shard"  # megatron-core does not shard experts twice
    job = Job(kind, sharding, EXPERTS if has_experts else {})
    shape = Pipeline(expert=2 if has_experts else 1, instances=2)
    run_ranks(check_parity, job, NAMES[kind], world_size=4, pipeline=shape)


@pytest.mark.parametrize("world_size", [2, 4])
def test_expert_parallelism(world_size: int) -> None:
    job = Job("mixed", settings=EXPERTS)
    run_ranks(check_parity, job, NAMES["mixed"], world_size=world_size, pipeline=Pipeline(expert=2))


def test_tensor_parallelism() -> None:
    run_ranks(check_parity, Job("dense"), DENSE, world_size=4, pipeline=Pipeline(tensor=2))


@has_overlap
@pytest.mark.parametrize("strategy", ["optim", "optim_grads", SHARDED])
def test_the_all_to_all_overlap(strategy: str) -> None:
    job = Job("mixed", Sharding(strategy), OVERLAP)
    run_ranks(check_parity, job, NAMES["mixed"], world_size=2, pipeline=Pipeline(expert=2))


@has_overlap
def test_the_all_to_all_overlap_where_experts_are_sharded_too() -> None:
    run_ranks(check_parity, Job("moe", settings=OVERLAP), MOE, world_size=4, pipeline=Pipeline(expert=2))


@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputation_gathers_weights_again(name: str) -> None:
    run_ranks(check_parity, Job("dense", settings=RECOMPUTED[name]), [name], world_size=2)


def _check_as_without(job: Job, names: Sequence[str]) -> None:
    """Parity, and neither more nor less is managed and emptied than without Megatron-FSDP."""
    stats, plain = check_parity(job, names), _plain(job, names)
    assert stats.num_emptied_storages == plain.num_emptied_storages > 0
    assert stats.num_viewed_storages == 0
    if job.kind == "dense":  # weights that have changed route tokens to other experts
        assert (stats.managed_bytes, stats.copied_out_bytes) == (plain.managed_bytes, plain.copied_out_bytes)


def _plain(job: Job, names: Sequence[str]) -> IterationStats:
    with apply(ALL, modules=names) as handle:
        run(make_chunks(make_config(job.kind, torch.bfloat16, **job.settings), wrap=True), job.microbatches[-1])
        assert handle.stats is not None
        return handle.stats


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["", "fsdp_double_buffer"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_saved_alias_of_a_weight_never_moves(strategy: str, option: str) -> None:
    """It is no view of a parameter, and its buffer is emptied, or has other weights, between forward and backward."""
    if option and strategy != SHARDED:
        pytest.skip("weights are in buffers of their own")
    sharding = Sharding(strategy, {option: True} if option else {})
    run_ranks(_check_aliases, Job("dense", sharding, {"add_bias_linear": False}, change=_save_aliases), world_size=2)


def _check_aliases(job: Job) -> None:
    chunks = make_job(job)
    config = ALL
    with apply(config, modules=["qkv_linear", "mlp_fc1"]) as handle, noting_moved_weights(CpuDevice, chunks) as moved:
        for num_microbatches in (2, 3):
            step(chunks, num_microbatches)
            assert handle.stats is not None and handle.stats.copied_out_bytes > 0
            assert not moved
            assert handle.engine is not None
            handle.engine.reset_iteration()  # as after an error: its books begin anew


def _save_aliases(chunk: torch.nn.Module) -> None:
    """Make linears save a detached weight, as quantized and fused ones save its bytes."""
    for module in chunk.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)) and module is not chunk.output_layer:
            module.forward = _forward_of(module)


def _forward_of(module: Any) -> Any:
    def forward(inputs: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return _SavesAlias.apply(inputs, module.weight), None

    return forward


class _SavesAlias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight.detach())
        return inputs.matmul(weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        inputs, weight = ctx.saved_tensors
        flat, grad = inputs.reshape(-1, inputs.shape[-1]), grads[0].reshape(-1, grads[0].shape[-1])
        return grads[0].matmul(weight), grad.t().matmul(flat)
