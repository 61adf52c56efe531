# SPDX-License-Identifier: Apache-2.0
"""Modules that CUDA graphs capture are refused with both settings named; all others are offloaded."""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from megatron_patches._model.graphs import captured_names, check_cuda_graphs, num_graphs_beside_copies  # noqa: E402
from megatron_patches._model.modules import MODULES  # noqa: E402

# As megatron-core keeps what it captures; for inference since 0.19.
Scope = enum.Enum("Scope", "attn mlp moe moe_router moe_preprocess mamba full_iteration")
Inference = enum.Enum("Inference", "none layer block")


def of_scopes(names: str, setting: str = "cuda_graph_scope", **settings: Any) -> Any:
    scopes = {setting: [Scope[scope] for scope in names.split()]}
    return SimpleNamespace(**{"cuda_graph_impl": "transformer_engine", **scopes, **settings})


@pytest.mark.parametrize("setting", ["cuda_graph_scope", "cuda_graph_modules"])
@pytest.mark.parametrize(
    ("scopes", "captured", "free"),
    [
        ("attn", "attn_norm layer_input qkv_linear core_attn mla_up_proj", "mlp_norm router_fc1"),
        ("mlp", "mlp_norm mlp_fc1 mlp_act", "core_attn moe_act router"),
        ("moe", "router experts dispatched_tokens shared_fc1", "core_attn mlp_fc1"),
        ("moe_router", "router mlp_norm shared_experts dispatched_tokens", "router_fc1 moe_act"),
        ("moe_preprocess", "router mlp_norm shared_fc1 dispatched_tokens", "experts mlp_fc2"),
        ("mamba", "mamba_mixer mamba_in_proj", "core_attn router_fc2 mtp_proj"),
        ("", " ".join(row.name for row in MODULES), ""),
    ],
)
def test_which_modules_are_captured(setting: str, scopes: str, captured: str, free: str) -> None:
    graphs, names = of_scopes(scopes, setting), [*free.split(), *captured.split()]
    assert captured_names(graphs, names) == captured.split()
    check_cuda_graphs(graphs, names)
    check_cuda_graphs(graphs, free.split(), has_budget=True)
    for name in captured.split():
        with pytest.raises(NotImplementedError, match=rf"offload_gpu_budget beside {setting}, which captures '{name}'"):
            check_cuda_graphs(graphs, [*free.split(), name], has_budget=True)


def test_layers_are_captured_behind_the_step_that_attaches_offload() -> None:
    check_cuda_graphs(of_scopes("attn", cuda_graph_warmup_steps=1), ["core_attn"])
    check_cuda_graphs(of_scopes("attn", cuda_graph_warmup_steps=0), ["router_fc1"])
    with pytest.raises(NotImplementedError, match="'core_attn', which cuda_graph_scope captures, .*_steps=0"):
        check_cuda_graphs(of_scopes("attn", cuda_graph_warmup_steps=0), ["core_attn"])


def test_copies_run_beside_graphs_where_nothing_is_eager_between_them() -> None:
    eager = ["attn", "moe_router", "attn moe_router moe_preprocess"]
    for scopes in (*eager, "", "attn mlp", "attn moe", "mamba"):
        assert num_graphs_beside_copies(of_scopes(scopes)) == (scopes not in eager)


@pytest.mark.parametrize("scopes", ["", "attn", "moe_router mamba"])
def test_the_local_implementation_is_refused(scopes: str) -> None:
    with pytest.raises(NotImplementedError, match="'router_fc1' beside cuda_graph_impl='local'"):
        check_cuda_graphs(of_scopes(scopes, cuda_graph_impl="local"), ["router_fc1"])


@pytest.mark.parametrize(
    "graphs",
    [
        {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []},
        {"cuda_graph_impl": "local", "cuda_graph_scope": [Scope.full_iteration]},
    ],
)
def test_where_steps_are_captured_whole_all_names_are_free_and_other_settings_are_not(graphs: dict[str, Any]) -> None:
    for steps in ({}, {"cuda_graph_warmup_steps": 3}):
        check_cuda_graphs(SimpleNamespace(**graphs, **steps), [row.name for row in MODULES])
    for settings, has_budget, message in (
        ({"cuda_graph_warmup_steps": 2}, False, "cuda_graph_warmup_steps=2"),
        ({}, True, "offload_gpu_budget beside a capture of whole steps"),
        ({"moe_expert_rank_capacity_factor": 1.5}, False, "moe_expert_rank_capacity_factor"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            check_cuda_graphs(SimpleNamespace(**graphs, **settings), ["core_attn"], has_budget)


def test_graphs_that_no_training_step_replays_are_let_be() -> None:
    old = of_scopes("", cuda_graph_impl="local", cuda_graph_scope=["full_iteration_inference"])
    new = of_scopes("", "cuda_graph_modules", cuda_graph_impl="local", inference_cuda_graph_scope=Inference.block)
    for graphs in (SimpleNamespace(), of_scopes("attn", cuda_graph_impl="none"), old, new):
        check_cuda_graphs(graphs, ["core_attn"])
    new.inference_cuda_graph_scope = Inference.layer  # its graphs are replayed in training, too
    with pytest.raises(NotImplementedError, match="local"):
        check_cuda_graphs(new, ["core_attn"])
