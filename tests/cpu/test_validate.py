# SPDX-License-Identifier: Apache-2.0
"""Unsupported models are refused, with both settings named."""

from __future__ import annotations

from contextlib import nullcontext
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


@pytest.mark.parametrize("name", ["gtp_weight_remat_size", "expert_gtp_weight_remat_size"])
def test_weights_that_are_gathered_in_backward_are_refused(name: str) -> None:
    for setting in ({}, {name: None}, {name: 1}):
        check_weights_stay_whole(config(**setting))
    with pytest.raises(NotImplementedError, match=f"{name}=2"):
        check_weights_stay_whole(config(**{name: 2}))


def test_inputs_that_full_recomputation_cuts_are_refused_in_a_pipeline() -> None:
    full = {"recompute_granularity": "full", "distribute_saved_activations": True}
    for change in ({"pipeline_model_parallel_size": 1}, {"recompute_granularity": "selective"}):
        check_inputs_stay_whole(config(**{**full, **change}))
    check_inputs_stay_whole(config(recompute_granularity="full"))
    with pytest.raises(NotImplementedError, match="distribute_saved_activations=True"):
        check_inputs_stay_whole(config(**full))


def test_megatron_cores_fused_modules_are_known_by_what_they_have() -> None:
    transformer_engine = pytest.importorskip("megatron.core.extensions.transformer_engine")
    shared_experts = pytest.importorskip("megatron.core.transformer.moe.shared_experts")
    fused = [getattr(transformer_engine, "TEFusedMLP", None), getattr(shared_experts, "FusedSharedExpertMLP", None)]
    assert all(calls_no_parts(cls.__new__(cls)) for cls in fused if cls is not None)


def test_nothing_conflicts_without_recomputation() -> None:
    check_conflicts(config(), [row.name for row in MODULES], NORMS)


@pytest.mark.parametrize(
    ("name", "module", "instead"),
    [
        ("router_fc2", "moe_act", "moe_act"),
        ("qkv_linear", "layernorm", "attn_norm"),
        ("mla_down_proj", "layernorm", "attn_norm"),
        ("mlp_fc1", "layernorm", "mlp_norm"),
        ("router", "layernorm", "mlp_norm"),
        ("mlp_act", "mlp", "mlp_fc1"),
        ("router_fc1", "moe", "router"),
        ("moe_act", "moe", "router"),
        ("shared_fc1", "moe", "router"),
        ("shared_fc2", "shared_experts", "shared_fc1"),
    ],
)
def test_recomputed_modules_are_refused(name: str, module: str, instead: str) -> None:
    """With the name of what can be moved."""
    chosen = config(recompute_granularity="selective", recompute_modules=[module])
    with pytest.raises(ValueError, match=f"'{name}'.*'{module}'.* Offload '{instead}', or drop one of the two"):
        check_conflicts(chosen, ["attn_proj", name], NORMS)
    check_conflicts(chosen, [instead], NORMS)


def test_the_input_of_each_recomputation_is_in_a_name() -> None:
    for row in MODULES:
        for module in row.input_of:
            chosen = config(recompute_granularity="selective", recompute_modules=[module])
            check_conflicts(chosen, [row.name], NORMS)
    refused = {module for row in MODULES for module in row.recomputed_by}
    assert refused == {module for row in MODULES for module in row.input_of}


@pytest.mark.parametrize(
    ("name", "module"), [("self_attn", "core_attn"), ("core_attn", "layernorm"), ("mlp_norm", "mlp")]
)
def test_names_that_still_save_tensors_are_accepted(name: str, module: str) -> None:
    check_conflicts(config(recompute_granularity="selective", recompute_modules=[module]), [name], NORMS)


@pytest.mark.parametrize(("name", "norm"), [("qkv_linear", "input_layernorm"), ("mlp_fc1", "pre_mlp_layernorm")])
def test_of_a_norm_inside_the_linear_layer_nothing_is_discarded(name: str, norm: str) -> None:
    chosen = config(recompute_granularity="selective", recompute_modules=["layernorm"])
    check_conflicts(chosen, [name], NORMS - {norm})
    with pytest.raises(ValueError, match=f"'{name}'.*'layernorm'"):
        check_conflicts(chosen, [name], frozenset({norm}))


@pytest.mark.parametrize(
    ("frequency", "is_refused"),
    [(1, False), (8, False), (9, True), ([1] * 7 + [0], False), ([1] * 8, True), (None, False)],
)
def test_names_discarded_by_gated_delta_nets_need_plain_attention(frequency: Any, is_refused: bool) -> None:
    chosen = config(
        recompute_granularity="selective", recompute_modules=["gdn_norm_out"], linear_attention_freq=frequency
    )
    expected = pytest.raises(ValueError, match="'attn_proj'.*'gdn_norm_out'") if is_refused else nullcontext()
    with expected:
        check_conflicts(chosen, ["self_attn", "attn_proj"], NORMS)


def test_a_conflict_tells_the_alias_it_may_have_been_asked_by() -> None:
    chosen = config(recompute_granularity="selective", recompute_modules=["moe"])
    with pytest.raises(ValueError, match="'router_fc1', but.*'expert_fc1' stands for 'router_fc1'"):
        check_conflicts(chosen, ["router_fc1"], NORMS)


@pytest.mark.parametrize("name", ["layer_input", "attn_norm", "mlp_norm"])
def test_a_norm_that_is_fused_with_the_residual_connection_is_refused(name: str) -> None:
    fused = config(fused_residual_rmsnorm=True)
    check_conflicts(fused, ["qkv_linear", "qk_norm", "mtp_norm"], NORMS)
    with pytest.raises(ValueError, match=f"'{name}'.*fused_residual_rmsnorm=True"):
        check_conflicts(fused, [name], NORMS)


def test_shared_experts_that_are_run_in_pieces_are_refused() -> None:
    for overlaps in (True, False):
        check_conflicts(config(moe_shared_expert_overlap=overlaps), ["shared_fc1", "shared_fc2"], NORMS)
    check_conflicts(config(moe_shared_expert_overlap=False), ["shared_experts"], NORMS)
    with pytest.raises(ValueError, match="'shared_experts'.*moe_shared_expert_overlap=True.*'shared_fc1'"):
        check_conflicts(config(moe_shared_expert_overlap=True), ["shared_fc1", "shared_experts"], NORMS)


def test_full_recomputation_leaves_the_layer_input() -> None:
    full = config(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    check_conflicts(full, ["layer_input"], NORMS)
    with pytest.raises(ValueError, match="recompute_granularity='full'.*'layer_input'"):
        check_conflicts(full, ["layer_input", "core_attn"], NORMS)


def test_layers_beyond_the_recomputed_block_still_save() -> None:
    block = {"recompute_granularity": "full", "recompute_method": "block"}
    check_conflicts(config(**block, recompute_num_layers=1), ["core_attn"], NORMS)
    with pytest.raises(ValueError, match="recompute_granularity='full'"):
        check_conflicts(config(**block, recompute_num_layers=2), ["core_attn"], NORMS)


def test_of_stages_of_several_sizes_one_may_have_layers_beyond_the_block() -> None:
    block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
    for setting in ({"num_layers_in_first_pipeline_stage": 5}, {"pipeline_model_parallel_layout": "Ettttt|tttL"}):
        check_conflicts(config(**block, **setting), ["core_attn"], NORMS)


def test_bytes_of_a_hidden_activation() -> None:
    assert hidden_bytes(config(), 16, 2) == 16 * 2 * 64 * 4
    assert hidden_bytes(config(bf16=True, context_parallel_size=2), 16, 2) == 8 * 2 * 64 * 2
    assert hidden_bytes(config(sequence_parallel=True, tensor_model_parallel_size=4), 16, 2) == 4 * 2 * 64 * 4


def test_a_stash_that_spills_to_the_host_needs_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    spills = {"moe_paged_stash": True, "moe_paged_stash_buffer_size_factor_cpu": 0.8}
    check_host_limit(config(**spills), 8192, 16, 2)
    check_host_limit(config(moe_paged_stash=True), None, 16, 2)
    assert not caplog.records
    check_host_limit(config(**spills), None, 16, 2)
    assert "moe_paged_stash_buffer_size_factor_cpu=0.8 pins host memory" in caplog.text


def test_host_limit_below_one_activation() -> None:
    check_host_limit(config(), None, 16, 2)
    check_host_limit(config(), 1, None, None)  # without a pipeline megatron-core does not ask for them
    check_host_limit(config(), 8192, 16, 2)
    with pytest.raises(ValueError, match="offload_host_limit_bytes=8,191 cannot hold .* 8,192 bytes"):
        check_host_limit(config(), 8191, 16, 2)


@pytest.mark.parametrize(
    ("stats", "settings", "reason"),
    [
        (IterationStats(num_groups=4), {}, "offload_min_tensor_bytes=1,048,576"),
        (IterationStats(num_groups=4), {}, "other saved tensors hooks"),
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
