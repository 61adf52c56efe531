# SPDX-License-Identifier: Apache-2.0
"""While a layer's dispatcher waits for the device, nothing that the layer has saved is copied out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_patches import apply
from offload_engine import FixedBounds
from tests.dist.launch import Pipeline, on_ranks
from tests.dist.settings import selective
from tests.dist.tiny import ALL, make_chunks, make_config, run, stats_of

BEFORE_THE_EXPERTS = ["qkv_linear", "core_attn", "attn_proj", "mlp_norm"]
GENEROUS = ALL.replace(policy=FixedBounds(max_inflight_bytes=1 << 30))


@pytest.mark.parametrize(
    ("kind", "settings", "names"),
    [
        pytest.param("mixed", {}, ["router"], id="alltoall, and dense layers"),
        pytest.param("moe", {"moe_token_dispatcher_type": "allgather"}, ["router"], id="allgather"),
        pytest.param("moe", selective("moe"), [], id="recomputed"),
    ],
)
@on_ranks()
def test_copies_begin_behind_the_experts(kind: str, settings: dict[str, Any], names: list[str]) -> None:
    """A dense layer waits for nothing."""
    copied: list[int] = []  # out, in front of each layer, at its MLP, and behind its MLP
    with apply(GENEROUS, modules=[*BEFORE_THE_EXPERTS, *names]) as handle:
        (model,) = make_chunks(make_config(kind, **settings))
        run([model], 1)  # makes the engine

        def note(*_: Any) -> None:
            if torch.is_grad_enabled():
                copied.append(stats_of(handle).copied_out_bytes)

        layers: Any = model.decoder.layers
        for layer in layers:
            layer.register_forward_pre_hook(note)
            layer.mlp.register_forward_pre_hook(note)
            layer.mlp.register_forward_hook(note)
        run([model], 1)
    has_experts = [hasattr(layer.mlp, "experts") for layer in layers]
    of_layers = zip(has_experts, copied[0::3], copied[1::3], copied[2::3], strict=True)
    for waits, before, at_its_mlp, behind_its_mlp in list(of_layers)[:-1]:  # the last layer's groups stay
        assert (before == at_its_mlp) == waits and (not waits or at_its_mlp < behind_its_mlp), copied


@on_ranks()
def test_groups_in_front_of_the_experts_delay_their_copies() -> None:
    copied: list[int] = []  # out, when the first layer's experts begin, and when its MLP is over
    with apply(GENEROUS, modules=["core_attn", "dispatched_tokens"]) as handle:
        (model,) = make_chunks(make_config("moe"))
        run([model], 1)
        mlp: Any = model.decoder.layers[0].mlp
        mlp.experts.register_forward_pre_hook(lambda *_: copied.append(stats_of(handle).copied_out_bytes))
        mlp.register_forward_hook(lambda *_: copied.append(stats_of(handle).copied_out_bytes))
        run([model], 1)
    assert copied[0] == 0 < copied[1]


@pytest.mark.parametrize("limits", [{"host_limit_bytes": 20_000}, {"min_tensor_bytes": 9_000}], ids=str)
@on_ranks(Pipeline(2))
def test_delayed_group_that_is_not_copied_out_is_no_miss(limits: dict[str, int]) -> None:
    """In a pipeline, where what was copied before a forward's tail is counted."""
    with apply(GENEROUS.replace(**limits), modules=[*BEFORE_THE_EXPERTS, "router"]) as handle:
        run(chunks := make_chunks(make_config("moe")), 4)
        stats = stats_of(handle)
        assert chunks and 0 < stats.num_offloaded_groups < stats.num_groups - stats.num_kept_groups
