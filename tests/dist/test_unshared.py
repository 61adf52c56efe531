# SPDX-License-Identifier: Apache-2.0
"""Modules that share no tensor with a group bypass the engine."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from megatron_patches import apply
from tests.dist.launch import Pipeline, on_ranks
from tests.dist.models import LATENT
from tests.dist.saved_storages import innermost_hooks, num_passing
from tests.dist.settings import OVERLAP, selective
from tests.dist.tiny import ALL, make_chunks, make_config, run

WAYS = pytest.mark.parametrize(
    ("settings", "shape"),
    [pytest.param({}, Pipeline(), id="called"), pytest.param(OVERLAP, Pipeline(expert=2), id="as nodes of a plan")],
)
PACKED = {
    "qkv_linear": {"linear_qkv", "final_layernorm"},
    "router_fc2": {"experts", "linear_fc2", "final_layernorm"},
    "dispatched_tokens": {"router", "experts", "linear_fc1", "final_layernorm"},
    "mlp_norm": {"router", "experts", "final_layernorm"},
}
"""Name -> the modules in which hooks pack what is saved, of those that are watched."""
WATCHED = ("linear_qkv", "core_attention", "router", "experts", "linear_fc1", "linear_fc2", "final_layernorm")


@WAYS
@on_ranks()
def test_modules_in_which_hooks_pack(settings: dict[str, Any], shape: Pipeline) -> None:
    for name, packed in PACKED.items():
        seen = defaultdict[str, set[bool]](set)

        def watch(what: str, module: Any, seen: Any) -> None:
            forward = module.forward

            def noted(*args: Any, **kwargs: Any) -> Any:
                if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                    seen[what].add(innermost_hooks(True) is not None)
                return forward(*args, **kwargs)

            module.forward = noted

        with apply(ALL, modules=[name]):
            chunks = make_chunks(make_config("moe", torch.bfloat16, **settings))
            for path, module in chunks[0].named_modules():
                what = path.rpartition(".")[2]
                if what in WATCHED:
                    watch(what, module, seen)
            run(chunks, 2)
        assert seen == {what: {what in packed} for what in WATCHED}, name


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {"qk_layernorm": True}),
    "shared experts": ("mixed", {"moe_layer_freq": [0, 1], "moe_shared_expert_intermediate_size": 32}),
    "latent attention": ("moe", LATENT),
    "further tokens": ("moe", {"mtp_num_layers": 1}),
    "recomputed": (
        "mixed",
        selective("core_attn", "mlp", moe_layer_freq=[0, 1]),
    ),
}


@WAYS
@on_ranks()
def test_tensors_that_bypass_the_engine_are_in_no_group(settings: dict[str, Any], shape: Pipeline) -> None:
    """Each name alone: were it otherwise, the group would free nothing, or bytes that are still read."""
    for model in ("shared experts", "latent attention") if settings else MODELS:
        kind, own = MODELS[model]
        more = {**own, **settings, "num_layers": 2}

        def train(offload: dict[str, Any], kind: str = kind, more: dict[str, Any] = more) -> None:
            run(make_chunks(make_config(kind, torch.bfloat16, **more, **offload)), 1)

        assert num_passing(train) > 0, model
