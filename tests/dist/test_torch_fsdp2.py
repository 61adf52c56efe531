# SPDX-License-Identifier: Apache-2.0
"""Model chunks sharded by torch (`--use-torch-fsdp2`): the same numbers, and no weight is taken for an activation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_patches import apply
from megatron_patches._model.unshared import unshared_modules
from tests.dist.launch import on_ranks
from tests.dist.models import LATENT
from tests.dist.parity import SAVES_COPIES
from tests.dist.tiny import ALL, make_chunks, make_config, run

DENSE = ["layer_input", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2"]
MOE = ["layer_input", "core_attn", "router", "dispatched_tokens", "router_fc1", "moe_act", "router_fc2"]


@pytest.mark.parametrize("reshard", [True, False], ids=["resharded", "kept whole"])
@pytest.mark.parametrize(
    ("kind", "names"), [("dense", DENSE), ("moe", MOE), ("dense", ["core_attn"])], ids=["dense", "moe", "one name"]
)
@on_ranks(world_size=2)
def test_losses_and_gradients_are_equal_to_the_last_bit(kind: str, names: list[str], reshard: bool) -> None:
    expected = _train(kind, reshard)
    with apply(ALL, modules=names) as handle:
        losses, gradients = _train(kind, reshard)
        assert handle.stats is not None and handle.stats.copied_in_bytes > 0
        assert handle.stats.num_storages_left == 0
    assert losses == expected[0]
    assert gradients.keys() == expected[1].keys()
    assert all(torch.equal(gradient, expected[1][name]) for name, gradient in gradients.items())


@on_ranks(world_size=2)
def test_modules_that_share_no_tensor_bypass_the_engine() -> None:
    (chunk,) = make_chunks(make_config())
    num_passing = len(unshared_modules(chunk, ["core_attn"]))
    _shard(chunk, True)
    assert len(unshared_modules(chunk, ["core_attn"])) == num_passing > 0


@on_ranks(world_size=2)
def test_storages_kept_by_megatron_core_are_emptied() -> None:
    """Torch derives a class from that of each layer, and hooks on it: both read nothing later."""
    settings = {**LATENT, "recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
    with apply(ALL, modules=["attn_norm", "qk_norm"]) as handle:
        _train("dense", True, **settings)
        # the embeddings of each microbatch, and copies that recomputation starts from
        assert handle.stats is not None and handle.stats.num_emptied_storages > (3 if SAVES_COPIES else 0)


def _train(kind: str, reshard: bool, **settings: Any) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    (chunk,) = chunks = make_chunks(make_config(kind, **settings))
    _shard(chunk, reshard)
    losses = [run(chunks, 3) for _ in range(2)]
    named: Any = chunk.named_parameters()
    return losses, {name: p.grad.to_local().clone() for name, p in named if p.grad is not None}


def _shard(chunk: Any, reshard: bool) -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in chunk.decoder.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(chunk, mesh=mesh, reshard_after_forward=reshard)
