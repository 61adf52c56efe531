# SPDX-License-Identifier: Apache-2.0
"""Modules that share no tensor with a group bypass the engine."""

from __future__ import annotations

import functools
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch  # noqa: E402

from megatron_patches import apply  # noqa: E402
from offload_engine import OffloadConfig  # noqa: E402
from tests.dist.launch import Pipeline, run_ranks  # noqa: E402
from tests.dist.models import LATENT  # noqa: E402
from tests.dist.saved_storages import innermost_hooks, num_passing  # noqa: E402
from tests.dist.tiny import make_chunks, make_config, run  # noqa: E402

ALL = OffloadConfig(min_tensor_bytes=1, directory="none")
OVERLAP = {"overlap_moe_expert_parallel_comm": True, "expert_model_parallel_size": 2}
WATCHED = ("linear_qkv", "core_attention", "router", "experts", "linear_fc1", "linear_fc2", "final_layernorm")


@pytest.mark.parametrize("settings", [{}, OVERLAP], ids=["called", "as nodes of a plan"])
@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("qkv_linear", {"linear_qkv", "final_layernorm"}),
        ("router_fc2", {"experts", "linear_fc2", "final_layernorm"}),
        ("dispatched_tokens", {"router", "experts", "linear_fc1", "final_layernorm"}),
        ("mlp_norm", {"router", "experts", "final_layernorm"}),
    ],
)
def test_modules_in_which_hooks_pack(name: str, packed: set[str], settings: dict[str, Any]) -> None:
    pipeline = Pipeline(expert=2) if settings else Pipeline()
    for seen in run_ranks(_see_hooks, name, settings, pipeline=pipeline):
        assert seen == {what: {what in packed} for what in WATCHED}, seen


def _see_hooks(name: str, settings: dict[str, Any]) -> dict[str, set[bool]]:
    """Submodule -> whether hooks pack what its forwards save."""
    seen: dict[str, set[bool]] = {}

    def note(what: str) -> None:
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            seen.setdefault(what, set()).add(innermost_hooks(True) is not None)

    with apply(ALL, modules=[name]):
        chunks = make_chunks(make_config("moe", torch.bfloat16, **settings))
        for path, module in (entry for chunk in chunks for entry in chunk.named_modules()):
            what = path.rpartition(".")[2]
            if what in WATCHED:
                _on_call(module, functools.partial(note, what))
        run(chunks, 2)
    return seen


def _on_call(module: torch.nn.Module, do: Any) -> None:
    forward = module.forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        do()
        return forward(*args, **kwargs)

    module.forward = noted  # type: ignore[method-assign]


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "shared experts": ("mixed", {"moe_layer_freq": [0, 1], "moe_shared_expert_intermediate_size": 32}),
    "latent attention": ("moe", LATENT),
    "further tokens": ("moe", {"mtp_num_layers": 1}),
    "norms of query and key": ("dense", {"qk_layernorm": True}),
    "recomputed": (
        "mixed",
        {"moe_layer_freq": [0, 1], "recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    ),
}


@pytest.mark.parametrize(
    ("model", "settings"),
    [*((model, {}) for model in MODELS), ("shared experts", OVERLAP), ("latent attention", OVERLAP)],
    ids=lambda value: value if isinstance(value, str) else "as nodes of a plan" if value else "called",
)
def test_tensors_that_bypass_the_engine_are_in_no_group(model: str, settings: dict[str, Any]) -> None:
    """Each name alone: were it otherwise, the group would free nothing, or bytes that are still read."""
    pipeline = Pipeline(expert=2) if settings else Pipeline()
    counts = run_ranks(_check_disjoint, model, settings, pipeline=pipeline)
    assert all(num_passed > 0 for num_passed in counts), counts


def _check_disjoint(model: str, settings: dict[str, Any]) -> int:
    """Count the storages that bypassed the engine."""
    kind, own = MODELS[model]
    more = {**own, **settings, "num_layers": 2}
    return num_passing(lambda offload: run(make_chunks(make_config(kind, torch.bfloat16, **more, **offload)), 2))


@pytest.mark.parametrize("settings", [{}, OVERLAP], ids=["called", "as nodes of a plan"])
@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_an_expert_that_raises_leaves_no_hooks_behind(error: type[BaseException], settings: dict[str, Any]) -> None:
    """An interrupt does not run the hooks behind a module's forward."""
    run_ranks(_raise_in_expert, error, settings, pipeline=Pipeline(expert=2) if settings else Pipeline())


def _raise_in_expert(error: type[BaseException], settings: dict[str, Any]) -> None:
    def fail() -> None:
        if is_failing:
            raise error("in an expert")

    is_failing = False
    with apply(ALL, modules=["qkv_linear"]):
        chunks = make_chunks(make_config("moe", torch.bfloat16, **settings))
        _on_call(chunks[0].decoder.layers[1].mlp.experts, fail)
        expected = run(chunks, 2)
        is_failing = True
        with pytest.raises(error, match="in an expert"):
            run(chunks, 2)
        assert innermost_hooks(True) is None
        is_failing = False
        assert run(chunks, 2) == expected
