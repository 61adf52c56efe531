# SPDX-License-Identifier: Apache-2.0
"""Megatron-FSDP over NCCL, with TransformerEngine's layers: the same bits, memory falls, and weights never move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import eq
from typing import Any

import pytest

from tests.dist.launch import Pipeline
from tests.dist.settings import selective
from tests.gpu.parity import Bits, check_bits, check_moved, deterministic_algorithms, run_twice
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
RECOMPUTED = selective("layernorm", **LATENT)
MICROBATCHES = (3, 1, 3)
LEAST_FALL = 1 / 3  # of the bytes that leave: of two layers, what the second has saved is at the peak all the same

GATHERED = {"fp8_param_gather": True}
Row = tuple[int, Pipeline, list[str], dict[str, Any], str, dict[str, Any]]
"""Ranks, their shape, names, settings of the model, strategy, and options of Megatron-FSDP."""
ROWS: dict[str, Row] = {
    **{name: (1, Pipeline(), DENSE, {}, name, {}) for name in ("no_shard", "optim", "optim_grads", SHARDED)},
    "double buffer": (1, Pipeline(), DENSE, {}, SHARDED, {"fsdp_double_buffer": True}),
    "experts": (1, Pipeline(), EXPERTS, HAS_EXPERTS, SHARDED, {}),
    "FP8": (1, Pipeline(), DENSE, FP8, SHARDED, {}),
    "FP8 weights": (1, Pipeline(), DENSE, FP8_WEIGHTS, SHARDED, GATHERED),
    "transposes": (1, Pipeline(), DENSE, FP8_WEIGHTS, SHARDED, {**GATHERED, "keep_fp8_transpose_cache": True}),
    "norms recomputed": (1, Pipeline(), ["attn_norm", "core_attn", "attn_proj"], RECOMPUTED, SHARDED, {}),
    "two ranks": (2, Pipeline(), DENSE, {}, SHARDED, {}),
    "two ranks, FP8 weights": (2, Pipeline(), DENSE, FP8_WEIGHTS, SHARDED, GATHERED),
    "two ranks, experts": (2, Pipeline(expert=2), EXPERTS, HAS_EXPERTS, SHARDED, {}),
    "overlap": (2, Pipeline(expert=2), EXPERTS, OVERLAP, SHARDED, {}),
    "delayed gradients": (2, Pipeline(expert=2), EXPERTS, {**OVERLAP, "delay_wgrad_compute": True}, SHARDED, {}),
    "overlap, only states sharded": (2, Pipeline(expert=2), EXPERTS, OVERLAP, "optim", {}),
}
for outer in ("no_shard", "optim"):
    options = {"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": outer}
    ROWS[f"hybrid, {outer}"] = (4, Pipeline(instances=2), DENSE, {}, SHARDED, options)


@pytest.mark.parametrize("row", ROWS)
def test_steps_are_those_without_offload(row: str, ranks_of: Callable[[int], GpuRanks]) -> None:
    num_ranks, shape, *job = ROWS[row]
    ranks_of(num_ranks).run(_check, *job, shape=shape)


def _check(names: Sequence[str], settings: dict[str, Any], strategy: str, options: dict[str, Any]) -> None:
    from megatron_patches import apply
    from offload_engine import OffloadConfig

    def train() -> tuple[Bits, int]:
        return _steps(settings, strategy, options)

    with deterministic_algorithms(warn_only=True):
        expected, without = run_twice(train, lambda a, b: eq(a[0], b[0]))
        with apply(OffloadConfig(min_tensor_bytes=4096), modules=names) as handle:
            got, peak = train()
            stats = check_moved(handle.stats)
    check_bits(expected, got)
    assert expected[0] != expected[-1], "nothing was learned"
    if not options and settings in ({}, HAS_EXPERTS):  # else there is more at the peak than what the groups save
        away = stats.copied_out_bytes // MICROBATCHES[-1]
        assert without - peak > LEAST_FALL * away, (without, peak, away)


def _steps(settings: dict[str, Any], strategy: str, options: dict[str, Any]) -> tuple[Bits, int]:
    from offload_engine._devices.cuda_runtime import CudaRuntime
    from tests.dist.megatron_fsdp import Sharding, noting_moved_weights, shard, step
    from tests.gpu.small_gpt import make_chunks, make_config, run, steps

    config = make_config(**settings)
    chunks = shard(config, make_chunks(config), Sharding(strategy, options))
    with noting_moved_weights(CudaRuntime, chunks) as moved:
        found = steps(chunks, MICROBATCHES, lambda chunks, number: step(chunks, number, run))
    assert not moved
    return found
