# SPDX-License-Identifier: Apache-2.0
"""Model chunks sharded by torch (`--use-torch-fsdp2`): the same numbers, and no weight is taken for an activation."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from megatron_patches import apply  # noqa: E402
from megatron_patches._model.unshared import unshared_modules  # noqa: E402
from offload_engine import OffloadConfig  # noqa: E402
from tests.dist.launch import run_ranks  # noqa: E402
from tests.dist.models import LATENT  # noqa: E402
from tests.dist.parity import SAVES_COPIES  # noqa: E402
from tests.dist.tiny import make_chunks, make_config, run  # noqa: E402

DENSE = ["layer_input", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2"]
MOE = ["layer_input", "core_attn", "router", "dispatched_tokens", "router_fc1", "moe_act", "router_fc2"]


@pytest.mark.parametrize("reshard", [True, False], ids=["resharded", "kept whole"])
@pytest.mark.parametrize(
    ("kind", "names"), [("dense", DENSE), ("moe", MOE), ("dense", ["core_attn"])], ids=["dense", "moe", "one name"]
)
def test_losses_and_gradients_are_equal_to_the_last_bit(kind: str, names: list[str], reshard: bool) -> None:
    run_ranks(_check_parity, kind, names, reshard, world_size=2)


def _check_parity(kind: str, names: list[str], reshard: bool) -> None:
    expected = _train(kind, reshard)
    with apply(OffloadConfig(min_tensor_bytes=1, directory="none"), modules=names) as handle:
        losses, gradients = _train(kind, reshard)
        assert handle.stats is not None and handle.stats.copied_in_bytes > 0
        assert handle.stats.num_storages_left == 0
    assert losses == expected[0]
    assert gradients.keys() == expected[1].keys()
    assert all(torch.equal(gradient, expected[1][name]) for name, gradient in gradients.items())


def test_modules_that_share_no_tensor_bypass_the_engine() -> None:
    run_ranks(_check_unshared, world_size=2)


def _check_unshared() -> None:
    (chunk,) = make_chunks(make_config())
    num_passing = len(unshared_modules(chunk, ["core_attn"]))
    _shard(chunk, True)
    assert len(unshared_modules(chunk, ["core_attn"])) == num_passing > 0


def test_storages_kept_by_megatron_core_are_emptied() -> None:
    """Torch derives a class from that of each layer, and hooks on it: both read nothing later."""
    run_ranks(_check_emptied, world_size=2)


def _check_emptied() -> None:
    settings = {**LATENT, "recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
    with apply(OffloadConfig(min_tensor_bytes=1, directory="none"), modules=["attn_norm", "qk_norm"]) as handle:
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
