# SPDX-License-Identifier: Apache-2.0
"""Megatron-FSDP over NCCL, with TransformerEngine's layers: the same bits, memory falls, and weights never move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import eq
from typing import Any

import pytest
import torch

from tests.dist.launch import Pipeline
from tests.gpu.parity import deterministic_algorithms, run_twice
from tests.gpu.ranks import GpuRanks
from tests.gpu.test_module_names import LATENT

pytest.importorskip("einops", reason="Megatron-FSDP arranges its ranks with it")

SHARDED = "optim_grads_params"
DENSE = ["qkv_linear", "core_attn", "attn_proj", "mlp_fc1", "mlp_act", "mlp_fc2"]
EXPERTS = ["core_attn", "attn_proj", "mlp_norm", "router", "dispatched_tokens", "moe_act", "router_fc2"]
HAS_EXPERTS: dict[str, Any] = {"num_moe_experts": 4}
OVERLAP: dict[str, Any] = {**HAS_EXPERTS, "overlap_moe_expert_parallel_comm": True}
FP8: dict[str, Any] = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
FP8_WEIGHTS: dict[str, Any] = {**FP8, "fp8_param": True}
# Norms of their own: in layers without latents they are fused into the linear layers.
RECOMPUTED: dict[str, Any] = {**LATENT, "recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
MICROBATCHES = (3, 1, 3)
LEAST_FALL = 1 / 3  # of the bytes that leave: of two layers, what the second has saved is at the peak all the same

ONE_RANK = [
    pytest.param(DENSE, {}, "no_shard", {}, id="no_shard"),
    pytest.param(DENSE, {}, "optim", {}, id="optim"),
    pytest.param(DENSE, {}, "optim_grads", {}, id="optim_grads"),
    pytest.param(DENSE, {}, SHARDED, {}, id=SHARDED),
    pytest.param(DENSE, {}, SHARDED, {"fsdp_double_buffer": True}, id="double buffer"),
    pytest.param(EXPERTS, HAS_EXPERTS, SHARDED, {}, id="experts"),
    pytest.param(DENSE, FP8, SHARDED, {}, id="FP8"),
    pytest.param(DENSE, FP8_WEIGHTS, SHARDED, {"fp8_param_gather": True}, id="FP8 weights"),
    pytest.param(
        DENSE,
        FP8_WEIGHTS,
        SHARDED,
        {"fp8_param_gather": True, "keep_fp8_transpose_cache": True},
        id="FP8 weights with transposes",
    ),
    pytest.param(["attn_norm", "core_attn", "attn_proj"], RECOMPUTED, SHARDED, {}, id="norms recomputed"),
]
TWO_RANKS = [
    pytest.param(Pipeline(), DENSE, {}, SHARDED, {}, id=SHARDED),
    pytest.param(Pipeline(), DENSE, FP8_WEIGHTS, SHARDED, {"fp8_param_gather": True}, id="FP8 weights"),
    pytest.param(Pipeline(expert=2), EXPERTS, HAS_EXPERTS, SHARDED, {}, id="experts"),
    pytest.param(Pipeline(expert=2), EXPERTS, OVERLAP, SHARDED, {}, id="overlap"),
    pytest.param(
        Pipeline(expert=2), EXPERTS, {**OVERLAP, "delay_wgrad_compute": True}, SHARDED, {}, id="delayed gradients"
    ),
    pytest.param(Pipeline(expert=2), EXPERTS, OVERLAP, "optim", {}, id="overlap, only states sharded"),
]


@pytest.mark.parametrize(("names", "settings", "strategy", "options"), ONE_RANK)
def test_on_one_gpu(
    names: Sequence[str],
    settings: dict[str, Any],
    strategy: str,
    options: dict[str, Any],
    ranks_of: Callable[[int], GpuRanks],
) -> None:
    ranks_of(1).run(_check, names, settings, strategy, options)


@pytest.mark.parametrize(("shape", "names", "settings", "strategy", "options"), TWO_RANKS)
def test_on_two_ranks(
    shape: Pipeline,
    names: Sequence[str],
    settings: dict[str, Any],
    strategy: str,
    options: dict[str, Any],
    ranks_of: Callable[[int], GpuRanks],
) -> None:
    ranks_of(2).run(_check, names, settings, strategy, options, shape=shape)


@pytest.mark.parametrize("outer", ["no_shard", "optim"])
def test_hybrid_sharding(outer: str, ranks_of: Callable[[int], GpuRanks]) -> None:
    options = {"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": outer}
    ranks_of(4).run(_check, DENSE, {}, SHARDED, options, shape=Pipeline(instances=2))


def _check(names: Sequence[str], settings: dict[str, Any], strategy: str, options: dict[str, Any]) -> None:
    from megatron_patches import apply
    from offload_engine import OffloadConfig

    def train() -> tuple[list[dict[str, str]], int]:
        return _steps(settings, strategy, options)

    with deterministic_algorithms(warn_only=True):
        expected, without = run_twice(train, lambda a, b: eq(a[0], b[0]))
        with apply(OffloadConfig(min_tensor_bytes=4096), modules=names) as handle:
            got, peak = train()
            stats = handle.stats
    wrong = [[name for name in a if a[name] != b[name]] for a, b in zip(expected, got, strict=True)]
    assert not any(wrong), f"steps differ from those without offload: {wrong}"
    assert expected[0] != expected[-1], "nothing was learned"
    assert stats is not None and 0 < stats.copied_in_bytes <= stats.copied_out_bytes
    assert stats.num_storages_left == 0
    if not options and settings in ({}, HAS_EXPERTS):  # else there is more at the peak than what the groups save
        away = stats.copied_out_bytes // MICROBATCHES[-1]
        assert without - peak > LEAST_FALL * away, (without, peak, away)


def _steps(settings: dict[str, Any], strategy: str, options: dict[str, Any]) -> tuple[list[dict[str, str]], int]:
    """Run three steps; return their bits, and the peak of allocated memory in the last, above what is there before."""
    from offload_engine._devices.cuda_runtime import CudaRuntime
    from tests.dist.megatron_fsdp import Sharding, noting_moved_weights, shard, step
    from tests.gpu.small_gpt import make_chunks, make_config, run

    config = make_config(**settings)
    chunks = shard(config, make_chunks(config), Sharding(strategy, options))
    bits, peaks = [], []
    with noting_moved_weights(CudaRuntime, chunks) as moved:
        for num_microbatches in MICROBATCHES:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            bits.append(step(chunks, num_microbatches, run))
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated() - before)
    assert not moved
    return bits, peaks[-1]
