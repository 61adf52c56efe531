# SPDX-License-Identifier: Apache-2.0
"""Chunks sharded by Megatron-FSDP, or by torch (`--use-torch-fsdp2`): the same numbers, and weights never move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_patches import apply
from megatron_patches._model.unshared import unshared_modules
from megatron_patches._versions import installed_version, is_in_range
from offload_engine._devices.cpu import CpuDevice
from tests.decoders import SavesDetached
from tests.dist.launch import Pipeline, on_ranks, run_ranks
from tests.dist.models import LATENT
from tests.dist.parity import SAVES_COPIES
from tests.dist.settings import ON_TWO_RANKS, OVERLAP, SHARED, full, selective
from tests.dist.tiny import ALL, engine_of, fingerprint, make_chunks, make_config, run, stats_of

pytest.importorskip("einops", reason="Megatron-FSDP arranges its ranks with it")

from tests.dist import megatron_fsdp  # noqa: E402
from tests.dist.megatron_fsdp import SHARDED, STRATEGIES, Job, Sharding, check_parity, make_job  # noqa: E402

DENSE = ["layer_input", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2"]
MOE = ["layer_input", "core_attn", "router", "dispatched_tokens", "router_fc1", "moe_act", "router_fc2"]
MIXED = [*MOE, "mlp_fc1", "mlp_act", "mlp_fc2"]
NO_BIAS = {"add_bias_linear": False}


# Buffers that take turns, and weights gathered module by module.
OPTIONS = (
    *("fsdp_double_buffer", "megatron_fsdp_max_pool_double_buffer"),
    "megatron_fsdp_enable_fine_grained_param_gather",
)
JOBS = {
    **{f"dense, {strategy}": Job("dense", Sharding(strategy)) for strategy in STRATEGIES},
    # The least is sharded, and the most.
    **{f"experts, {strategy}": Job("moe", Sharding(strategy)) for strategy in (STRATEGIES[0], SHARDED)},
    **{each: Job("dense", Sharding(options={each: True}), microbatches=(3, 1, 3)) for each in OPTIONS},
    # Units are parts of layers, so that fewer weights are gathered at once. Layers add biases outside of these.
    "attention and MLPs": Job("dense", Sharding(units=(SelfAttention, MLP)), NO_BIAS),
    "MoE layers": Job("moe", Sharding(units=(MoELayer,))),
}


@pytest.mark.parametrize("row", JOBS)
@on_ranks(world_size=2)
def test_as_without_sharding(row: str) -> None:
    """Parity, and neither more nor less is managed and emptied than without Megatron-FSDP."""
    job = JOBS[row]
    names = DENSE if job.kind == "dense" else MOE
    stats = check_parity(job, names, has_report=job.kind == "dense")
    with apply(ALL, modules=names, has_report=False) as handle:
        chunks = make_chunks(make_config(job.kind, torch.bfloat16, **job.settings), wrap=True)
        run(chunks, job.microbatches[-1])
        plain = stats_of(handle)
    assert stats.num_emptied_storages == plain.num_emptied_storages > 0
    assert stats.num_viewed_storages == 0
    if job.kind == "dense":  # weights that have changed route tokens to other experts
        assert (stats.managed_bytes, stats.copied_out_bytes) == (plain.managed_bytes, plain.copied_out_bytes)


IN_SHARES = {"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim"}
REPLICAS = {"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "no_shard"}
OVERLAPPING = {**OVERLAP, **SHARED}
ROWS: dict[str, tuple[int, Pipeline, Job, list[str]]] = {
    # megatron-core does not shard experts twice
    "replicas": (4, Pipeline(expert=2, instances=2), Job("moe", Sharding(options=REPLICAS), ON_TWO_RANKS), MOE),
    "shards of shards": (4, Pipeline(instances=2), Job("dense", Sharding(options=IN_SHARES)), DENSE),
    "experts": (4, Pipeline(expert=2), Job("mixed", settings=ON_TWO_RANKS), MIXED),
    "tensor parallel": (4, Pipeline(tensor=2), Job("dense"), DENSE),
    "layers recomputed": (2, Pipeline(), Job("dense", settings=full()), ["layer_input"]),
    "norms recomputed": (2, Pipeline(), Job("dense", settings=selective("layernorm", **NO_BIAS)), ["attn_norm"]),
    "MLPs recomputed": (2, Pipeline(), Job("dense", settings=selective("layernorm", "mlp", **NO_BIAS)), ["mlp_norm"]),
}
if is_in_range(installed_version() or "0", ">=0.19"):  # Megatron-FSDP runs under the overlap from there on
    ROWS["overlap"] = (2, Pipeline(expert=2), Job("mixed", Sharding("optim_grads"), OVERLAPPING), MIXED)
    ROWS["overlap, sharded"] = (4, Pipeline(expert=2), Job("mixed", settings=OVERLAPPING), MIXED)


@pytest.mark.parametrize("row", ROWS)
def test_losses_and_gradients_are_equal_to_the_last_bit(row: str) -> None:
    world_size, shape, job, names = ROWS[row]
    run_ranks(check_parity, job, names, world_size=world_size, pipeline=shape)


# ---- weights ---------------------------------------------------------------------------------------------------------


@on_ranks(world_size=2)
def test_a_saved_alias_of_a_weight_never_moves() -> None:
    """It is no view of a parameter, and its buffer is emptied, or has other weights, between forward and backward."""
    shardings = [*(Sharding(strategy) for strategy in STRATEGIES), Sharding(options={"fsdp_double_buffer": True})]
    for sharding in shardings:
        chunks = make_job(Job("dense", sharding, NO_BIAS, change=_save_aliases))
        names = ["qkv_linear", "mlp_fc1"]
        with apply(ALL, modules=names) as handle, megatron_fsdp.noting_moved_weights(CpuDevice, chunks) as moved:
            for num_microbatches in (2, 3):
                megatron_fsdp.step(chunks, num_microbatches)
                assert stats_of(handle).copied_out_bytes > 0
                assert not moved, sharding
                engine_of(handle).reset_iteration()  # as after an error: its books begin anew


def _save_aliases(chunk: torch.nn.Module) -> None:
    """Make linears save a detached weight, as quantized and fused ones save its bytes."""
    for module in chunk.modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)) and module is not chunk.output_layer:
            module.forward = lambda inputs, *_, module=module, **__: (SavesDetached.apply(inputs, module.weight), None)


# ---- torch's ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reshard", [True, False], ids=["resharded", "kept whole"])
@on_ranks(world_size=2)
def test_parity_under_torchs(reshard: bool) -> None:
    for kind, names in (("dense", DENSE), ("moe", MOE)):
        expected = _train_torch(kind, reshard)
        with apply(ALL, modules=names, has_report=kind == "moe") as handle:
            assert _train_torch(kind, reshard) == expected, names
            assert stats_of(handle).copied_in_bytes > 0 and stats_of(handle).num_storages_left == 0


@on_ranks(world_size=2)
def test_layers_under_torchs_are_known_to_be_megatron_cores() -> None:
    """Torch derives a class from that of each layer, and hooks on it: both read nothing later."""
    with apply(ALL, modules=["attn_norm", "qk_norm"]) as handle:
        _train_torch("dense", True, **selective("mla_up_proj", **LATENT))
        # the embeddings of each microbatch, and copies that recomputation starts from
        assert stats_of(handle).num_emptied_storages > (3 if SAVES_COPIES else 0)
    (chunk,) = make_chunks(make_config())
    num_passing = len(unshared_modules(chunk, ["core_attn"]))
    _shard_by_torch(chunk, True)
    assert len(unshared_modules(chunk, ["core_attn"])) == num_passing > 0


def _train_torch(kind: str, reshard: bool, **settings: Any) -> dict[str, str]:
    (chunk,) = chunks = make_chunks(make_config(kind, **settings))
    _shard_by_torch(chunk, reshard)
    losses = [loss for _ in range(2) for loss in run(chunks, 3)]
    for parameter in chunk.parameters():
        parameter.main_grad = None if parameter.grad is None else parameter.grad.to_local()
    return fingerprint(chunks, losses)


def _shard_by_torch(chunk: Any, reshard: bool) -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in (*chunk.decoder.layers, chunk):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
