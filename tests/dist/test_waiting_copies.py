# SPDX-License-Identifier: Apache-2.0
"""While a layer's dispatcher waits for the device, nothing that the layer has saved is copied out."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

pytest.importorskip("megatron.core")

import torch  # noqa: E402

from megatron_patches import apply  # noqa: E402
from offload_engine import FixedBounds, OffloadConfig  # noqa: E402
from tests.dist.launch import Pipeline, run_ranks  # noqa: E402
from tests.dist.tiny import make_chunks, make_config, run  # noqa: E402

BEFORE_THE_EXPERTS = ["qkv_linear", "core_attn", "attn_proj", "mlp_norm", "router"]
GENEROUS = OffloadConfig(min_tensor_bytes=1, policy=FixedBounds(max_inflight_bytes=1 << 30), directory="none")


class Layer(NamedTuple):
    """Copy-outs issued so far in the iteration, in bytes."""

    before: int
    at_its_mlp: int
    behind_its_mlp: int


RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


@pytest.mark.parametrize(
    "settings",
    [{"moe_token_dispatcher_type": "alltoall"}, {"moe_token_dispatcher_type": "allgather"}, RECOMPUTED],
    ids=["alltoall", "allgather", "recomputed"],
)
def test_copies_begin_behind_the_experts(settings: dict[str, Any]) -> None:
    (layers,) = run_ranks(_record, "moe", settings)
    for layer in layers:
        assert layer.before == layer.at_its_mlp < layer.behind_its_mlp, layers


def test_groups_in_front_of_the_experts_delay_their_copies() -> None:
    (copied,) = run_ranks(_copied_at_the_experts)
    assert copied[0] == 0 < copied[1]


@pytest.mark.parametrize("limits", [{"host_limit_bytes": 20_000}, {"min_tensor_bytes": 9_000}], ids=str)
def test_delayed_group_that_is_not_copied_out_is_no_miss(limits: dict[str, int]) -> None:
    """In a pipeline, where what was copied before a forward's tail is counted."""
    run_ranks(_check_with_limits, limits, pipeline=Pipeline(2))


def test_a_dense_layer_waits_for_nothing() -> None:
    (layers,) = run_ranks(_record, "mixed", {})
    dense, sparse = layers[0::2], layers[1::2]
    assert all(layer.before < layer.at_its_mlp for layer in dense), dense
    assert all(layer.before == layer.at_its_mlp < layer.behind_its_mlp for layer in sparse), sparse


def _record(kind: str, settings: dict[str, Any]) -> list[Layer]:
    """Return what each layer of one forward finds and leaves, without the last, whose groups stay."""
    layers: list[Layer] = []
    names = [name for name in BEFORE_THE_EXPERTS if name != "router" or "recompute_modules" not in settings]
    with apply(GENEROUS, modules=names) as handle:
        model = make_chunks(make_config(kind, **settings))[0]
        run([model], 1)  # makes the engine
        seen: list[int] = []

        def note(*_: Any) -> None:
            if torch.is_grad_enabled() and handle.engine is not None:
                seen.append(handle.engine.stats.copied_out_bytes)

        for layer in model.decoder.layers:
            layer.register_forward_pre_hook(note)
            layer.mlp.register_forward_pre_hook(note)
            layer.mlp.register_forward_hook(note)
        run([model], 1)
        for before, at_its_mlp, behind_its_mlp in zip(seen[0::3], seen[1::3], seen[2::3], strict=True):
            layers.append(Layer(before, at_its_mlp, behind_its_mlp))
    return layers[:-1]


def _copied_at_the_experts() -> list[int]:
    """Return the bytes issued when the first layer's experts begin, and when its MLP is over."""
    copied: list[int] = []
    with apply(GENEROUS, modules=["core_attn", "dispatched_tokens"]) as handle:
        model = make_chunks(make_config("moe"))[0]
        run([model], 1)

        def note(*_: Any) -> None:
            assert handle.engine is not None
            copied.append(handle.engine.stats.copied_out_bytes)

        mlp = model.decoder.layers[0].mlp
        mlp.experts.register_forward_pre_hook(note)
        mlp.register_forward_hook(note)
        run([model], 1)
    return copied


def _check_with_limits(limits: dict[str, int]) -> None:
    with apply(GENEROUS.replace(**limits), modules=BEFORE_THE_EXPERTS) as handle:
        chunks = make_chunks(make_config("moe"))
        run(chunks, 4)
        assert handle.stats is not None
        assert 0 < handle.stats.num_offloaded_groups < handle.stats.num_groups - handle.stats.num_kept_groups
