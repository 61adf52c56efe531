# SPDX-License-Identifier: Apache-2.0
"""Unsupported models are refused, with both settings named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from megatron_patches._model.modules import MODULES  # noqa: E402
from megatron_patches._model.sites import BLOCKS, calls_no_parts  # noqa: E402
from megatron_patches._model.validate import (  # noqa: E402
    check_conflicts,
    check_host_limit,
    check_inputs_stay_whole,
    check_weights_stay_whole,
    hidden_bytes,
    why_nothing_moved,
)
from offload_engine import IterationStats, OffloadConfig

NORMS = frozenset(BLOCKS.values())
"""Of a model that has each as a module of its own."""


def config(**settings: Any) -> SimpleNamespace:
    defaults = {
        "num_layers": 8,
        "hidden_size": 64,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
        "sequence_parallel": False,
        "bf16": False,
        "fp16": False,
        "recompute_granularity": None,
        "recompute_modules": ["core_attn"],
        "recompute_method": None,
        "recompute_num_layers": None,
    }
    return SimpleNamespace(**{**defaults, **settings})


def recomputing(*modules: str, **settings: Any) -> SimpleNamespace:
    return config(recompute_granularity="selective", recompute_modules=[*modules], **settings)


def block(num_layers: int, **settings: Any) -> SimpleNamespace:
    method = {"recompute_granularity": "full", "recompute_method": "block"}
    return config(**method, recompute_num_layers=num_layers, **settings)


UNIFORM = config(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@pytest.mark.parametrize(
    ("name", "module", "instead"),
    [
        ("router_fc2", "moe_act", "moe_act"),
        ("qkv_linear", "layernorm", "attn_norm"),
        ("router", "layernorm", "mlp_norm"),
        ("mlp_act", "mlp", "mlp_fc1"),
        ("router_fc1", "moe", "router"),
        ("shared_fc2", "shared_experts", "shared_fc1"),
    ],
)
def test_recomputed_modules_are_refused_with_the_name_of_what_can_be_moved(
    name: str, module: str, instead: str
) -> None:
    chosen = recomputing(module)
    with pytest.raises(ValueError, match=f"'{name}'.*'{module}'.* Offload '{instead}', or omit one of the two"):
        check_conflicts(chosen, ["attn_proj", name], NORMS)
    check_conflicts(chosen, [instead], NORMS)


@pytest.mark.parametrize(
    ("chosen", "names", "norms"),
    [
        (config(), [row.name for row in MODULES], NORMS),
        (recomputing("layernorm"), ["qkv_linear"], NORMS - {"input_layernorm"}),  # inside the linear layer
        *(
            (recomputing("gdn_norm_out", linear_attention_freq=freq), ["attn_proj"], NORMS)
            for freq in (8, [1] * 7 + [0], None)
        ),
        (config(fused_residual_rmsnorm=True), ["qkv_linear", "qk_norm", "mtp_norm"], NORMS),
        (config(moe_shared_expert_overlap=True), ["shared_fc1", "shared_fc2"], NORMS),
        (config(moe_shared_expert_overlap=False), ["shared_experts"], NORMS),
        (UNIFORM, ["layer_input"], NORMS),
        (block(1), ["core_attn"], NORMS),  # layers behind the block still save
        (block(2, num_layers_in_first_pipeline_stage=5), ["core_attn"], NORMS),
        (block(2, pipeline_model_parallel_layout="Ettttt|tttL"), ["core_attn"], NORMS),
    ],
)
def test_names_that_still_save_tensors_are_accepted(
    chosen: SimpleNamespace, names: list[str], norms: frozenset[str]
) -> None:
    check_conflicts(chosen, names, norms)


@pytest.mark.parametrize(
    ("chosen", "names", "message"),
    [
        (recomputing("gdn_norm_out", linear_attention_freq=9), ["attn_proj"], "'attn_proj'.*'gdn_norm_out'"),
        (recomputing("gdn_norm_out", linear_attention_freq=[1] * 8), ["attn_proj"], "'attn_proj'.*'gdn_norm_out'"),
        (recomputing("moe"), ["router_fc1"], "'router_fc1', but.*'expert_fc1' stands for 'router_fc1'"),
        (config(fused_residual_rmsnorm=True), ["mlp_norm"], "'mlp_norm'.*fused_residual_rmsnorm=True"),
        (config(moe_shared_expert_overlap=True), ["shared_experts"], "moe_shared_expert_overlap=True.*'shared_fc1'"),
        (UNIFORM, ["layer_input", "core_attn"], "recompute_granularity='full'.*'layer_input'"),
        (block(2), ["core_attn"], "recompute_granularity='full'"),
    ],
)
def test_names_that_save_nothing_are_refused(chosen: SimpleNamespace, names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_conflicts(chosen, names, NORMS)


def test_weights_and_inputs_that_are_cut_are_refused() -> None:
    full = {"recompute_granularity": "full", "distribute_saved_activations": True}
    for name in ("gtp_weight_remat_size", "expert_gtp_weight_remat_size"):
        for setting in ({}, {name: None}, {name: 1}):
            check_weights_stay_whole(config(**setting))
        with pytest.raises(NotImplementedError, match=f"{name}=2"):
            check_weights_stay_whole(config(**{name: 2}))
    for change in ({"pipeline_model_parallel_size": 1}, {"recompute_granularity": "selective"}):
        check_inputs_stay_whole(config(**{**full, **change}))
    with pytest.raises(NotImplementedError, match="distribute_saved_activations=True"):
        check_inputs_stay_whole(config(**full))


def test_megatron_cores_fused_modules_are_known_by_what_they_have() -> None:
    transformer_engine = pytest.importorskip("megatron.core.extensions.transformer_engine")
    shared_experts = pytest.importorskip("megatron.core.transformer.moe.shared_experts")
    fused = [getattr(transformer_engine, "TEFusedMLP", None), getattr(shared_experts, "FusedSharedExpertMLP", None)]
    assert all(calls_no_parts(cls.__new__(cls)) for cls in fused if cls is not None)


def test_host_limit_below_one_activation(caplog: pytest.LogCaptureFixture) -> None:
    assert hidden_bytes(config(bf16=True, context_parallel_size=2), 16, 2) == 8 * 2 * 64 * 2
    assert hidden_bytes(config(sequence_parallel=True, tensor_model_parallel_size=4), 16, 2) == 4 * 2 * 64 * 4
    check_host_limit(config(), 1, None, None)  # without a pipeline megatron-core does not ask for them
    check_host_limit(config(), 8192, 16, 2)
    with pytest.raises(ValueError, match="offload_host_limit_bytes=8,191 cannot hold .* 8,192 bytes"):
        check_host_limit(config(), 8191, 16, 2)
    spills = {"moe_paged_stash": True, "moe_paged_stash_buffer_size_factor_cpu": 0.8}
    check_host_limit(config(**spills), 8192, 16, 2)
    check_host_limit(config(moe_paged_stash=True), None, 16, 2)
    assert not caplog.records
    check_host_limit(config(**spills), None, 16, 2)
    assert "moe_paged_stash_buffer_size_factor_cpu=0.8 pins host memory" in caplog.text


@pytest.mark.parametrize(
    ("stats", "settings", "reason"),
    [
        (IterationStats(num_groups=4), {}, "offload_min_tensor_bytes=1,048,576"),
        (IterationStats(num_groups=4, num_kept_groups=4), {}, "offload_min_tensor_bytes"),
        (IterationStats(num_groups=4, num_kept_groups=4, managed_bytes=1 << 20), {}, "at once"),
        (IterationStats(num_groups=4, num_kept_groups=3, managed_bytes=1 << 20), {}, None),
        (IterationStats(num_groups=4, managed_bytes=1 << 20, copied_out_bytes=1 << 20), {}, None),
        (IterationStats(num_groups=4), {"dry_run": True}, None),
        (IterationStats(num_groups=4), {"resident_bytes": 1 << 30}, None),
        (IterationStats(), {}, None),
    ],
)
def test_why_a_step_has_moved_nothing(stats: IterationStats, settings: dict[str, Any], reason: str | None) -> None:
    found = why_nothing_moved(stats, OffloadConfig.from_flags(**settings))
    assert found is None if reason is None else found is not None and reason in found
