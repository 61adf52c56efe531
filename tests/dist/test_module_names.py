# SPDX-License-Identifier: Apache-2.0
"""Every module name, alone and together with all the others, in each kind of model that has it: the same bits."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from megatron_patches._model.modules import MODULES
from tests.dist.launch import Pipeline, run_ranks
from tests.dist.models import HYBRID, LATENT
from tests.dist.names import leaves
from tests.dist.parity import Case, check_all, run_with, run_without

DEEP = Pipeline(2, 2, expert=2)
SHAPES = [Pipeline(), DEEP]

ATTENTION = ["layer_input", "attn_norm", "self_attn", "qkv_linear", "core_attn", "attn_proj"]
DENSE = ["mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2"]
EXPERTS = ["router", "dispatched_tokens", "experts", "router_fc1", "moe_act", "router_fc2"]
SHARED = ["shared_experts", "shared_fc1", "shared_fc2"]
LATENTS = ["mla_down_proj", "qk_norm", "mla_up_proj"]
AHEAD = ["mtp_norm", "mtp_proj"]
MAMBA = ["mamba_mixer", "mamba_in_proj", "mamba_out_proj"]


def test_no_name_is_left_out() -> None:
    elsewhere = {"gdp_qkv"}  # in test_gated_delta_product
    assert {*ATTENTION, *DENSE, *EXPERTS, *SHARED, *LATENTS, *AHEAD, *MAMBA} == {r.name for r in MODULES} - elsewhere


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense_and_expert_layers(shape: Pipeline) -> None:
    """With one layer in each virtual stage, some chunks hold dense layers only."""
    settings = {**_expert_parallel(shape), "moe_shared_expert_intermediate_size": 32}
    names = [*ATTENTION, *DENSE, *EXPERTS, *SHARED]
    alone = names if shape.size == 1 else ["mlp_fc1", "shared_fc1", "router_fc1"]
    _run(shape, "mixed", [*([name] for name in alone), names, leaves(names)], settings)


def test_one_storage_that_several_modules_save_moves_once() -> None:
    """The input of the router is that of the shared experts."""
    settings = {"moe_shared_expert_intermediate_size": 32}
    each = [["router"], ["shared_fc1"], ["router", "shared_fc1"]]
    cases = [Case("moe", names, settings=settings) for names in each]
    (moved,) = run_ranks(_copied_bytes, cases)
    router, shared, both = moved
    assert 0 < shared < router == both


def _copied_bytes(cases: list[Case]) -> list[int]:
    expected = run_without(cases[0], [1])
    steps = [run_with(case, [1], expected) for case in cases]
    return [stats.copied_out_bytes for (stats,) in steps]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shared_experts_that_overlap(shape: Pipeline) -> None:
    """They run in pieces, called by the dispatcher between its own steps."""
    overlap = {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_overlap": True}
    settings = {**_expert_parallel(shape), **overlap}
    names = ["shared_fc1", "shared_fc2", *EXPERTS]
    _run(shape, "moe", [["shared_fc1"], ["shared_fc2"], names, leaves(names)], settings)


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_dispatchers(dispatcher: str) -> None:
    settings = {**_expert_parallel(DEEP), "moe_token_dispatcher_type": dispatcher}
    _run(DEEP, "moe", [["dispatched_tokens"], EXPERTS, leaves(EXPERTS)], settings)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_grouped_experts(shape: Pipeline) -> None:
    settings = {**_expert_parallel(shape), "moe_grouped_gemm": True}
    alone = EXPERTS[1:] if shape.size == 1 else []
    _run(shape, "moe", [*([name] for name in alone), EXPERTS, leaves(EXPERTS)], settings)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_latent_attention(shape: Pipeline) -> None:
    names = [*ATTENTION, *LATENTS]
    settings = {**_expert_parallel(shape), **LATENT}
    alone = ["qkv_linear", *LATENTS] if shape.size == 1 else []
    _run(shape, "mixed", [*([name] for name in alone), names, leaves(names)], settings)
    # without a latent the query has one projection
    plain = {**settings, "q_lora_rank": None, "qk_layernorm": False}
    _run(shape, "mixed", [["mla_down_proj", "mla_up_proj"]], plain)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_multi_token_prediction(shape: Pipeline) -> None:
    names = [*ATTENTION, *EXPERTS, "mlp_norm", *AHEAD]
    settings = {**_expert_parallel(shape), "mtp_num_layers": 2}
    _run(shape, "moe", [["mtp_norm"], ["mtp_proj"], ["core_attn"], names, leaves(names)], settings)


@pytest.mark.parametrize("shape", [Pipeline(), Pipeline(2, expert=2)], ids=str)
def test_hybrid_models(shape: Pipeline) -> None:
    """Each layer is Mamba, attention, a dense MLP or experts, and nothing else."""
    names = [*MAMBA, *ATTENTION, *DENSE, *EXPERTS]
    settings = {**_expert_parallel(shape), **HYBRID}
    alone = [*MAMBA, *DENSE, *EXPERTS] if shape.size == 1 else []
    _run(shape, "moe", [*([name] for name in alone), names, leaves(names)], settings)


@pytest.mark.skipif(
    not find_spec("megatron.core.models.hybrid"), reason="HybridModel, of 0.19.2, has virtual stages first"
)
def test_hybrid_models_with_virtual_stages() -> None:
    """Some hold experts, and some Mamba layers."""
    names = [*MAMBA, *ATTENTION, *DENSE, *EXPERTS]
    settings = {**_expert_parallel(DEEP), **HYBRID, "num_layers": 8}
    _run(DEEP, "moe", [["mamba_mixer"], ["mamba_in_proj", "router_fc1"], names, leaves(names)], settings)


def _run(shape: Pipeline, kind: str, each: list[list[str]], settings: dict[str, Any]) -> None:
    cases = [Case(kind, names, settings=settings) for names in each]
    run_ranks(check_all, cases, [2] if shape.size == 1 else [4], pipeline=shape, timeout_s=240.0)


def _expert_parallel(shape: Pipeline) -> dict[str, Any]:
    return {"expert_model_parallel_size": shape.expert}
