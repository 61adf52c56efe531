# SPDX-License-Identifier: Apache-2.0
"""The table of module names: where each is found, what is said where it is not, and which models are refused."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from offload_engine import IterationStats, OffloadConfig

pytest.importorskip("megatron.core")

import torch  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402

from megatron_patches._hooks.attach import last_of_each_name  # noqa: E402
from megatron_patches._model.modules import MODULES, canonical_names
from megatron_patches._model.sites import BLOCKS, calls_no_parts, find_sites, survey  # noqa: E402  # noqa: E402
from megatron_patches._model.validate import (  # noqa: E402
    _missing_message,
    check_conflicts,
    check_host_limit,
    check_inputs_stay_whole,
    check_weights_stay_whole,
    hidden_bytes,
    why_nothing_moved,
)


class _Part(torch.nn.Linear):
    """A submodule as far as its class matters."""

    __module__ = TransformerLayer.__module__  # of others it is not known what they read

    def __init__(self) -> None:
        super().__init__(1, 1)


class _Layer(TransformerLayer):
    """A transformer layer with the submodules given by path, and nothing else."""

    __module__ = TransformerLayer.__module__  # of others it is not known what their submodules share

    def __init__(self, *paths: str, identities: tuple[str, ...] = ()) -> None:
        torch.nn.Module.__init__(self)
        for path in paths:
            _put(self, path, _Part())
        for path in identities:
            _put(self, path, IdentityOp())


def _put(owner: torch.nn.Module, path: str, module: torch.nn.Module) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        if not hasattr(owner, parent):
            owner.add_module(parent, _Part())
        owner = getattr(owner, parent)
    owner.add_module(name, module)


ATTENTION = ("input_layernorm", *(f"self_attention.{part}" for part in ("linear_qkv", "core_attention", "linear_proj")))
DENSE = (*ATTENTION, "pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2")
EXPERTS = tuple(f"mlp.experts.local_experts.{i}.linear_fc{j}" for i in (0, 1, 10) for j in (1, 2))
MOE = (*ATTENTION, "pre_mlp_layernorm", "mlp.router", *EXPERTS)


def test_sites_come_in_the_order_of_execution() -> None:
    chunk = torch.nn.Sequential(_Layer(*DENSE), _Layer(*MOE))
    names = canonical_names(["router_fc1", "moe_act", "mlp_act", "core_attn", "attn_norm"])
    found = find_sites(chunk, names)
    experts = [(name, f"1.mlp.experts.local_experts.{i}.linear_fc1") for i in (0, 1, 10) for name in names[-2:]]
    assert [(site.name, site.path) for site in found] == [
        ("attn_norm", "0.input_layernorm"),
        ("core_attn", "0.self_attention.core_attention"),
        ("mlp_act", "0.mlp.linear_fc1"),
        ("attn_norm", "1.input_layernorm"),
        ("core_attn", "1.self_attention.core_attention"),
        *experts,
    ]
    assert [site.until for site in found if site.until] == [
        "0.mlp.linear_fc2",
        *(f"1.mlp.experts.local_experts.{i}.linear_fc2" for i in (0, 1, 10)),
    ]
    assert [site.layer for site in found] == [0] * 3 + [1] * (len(found) - 3)
    assert [site.path for site in found if site.is_before_experts] == [site.path for site in found[3:5]]


def test_an_identity_is_no_site_and_is_said_to_be_fused() -> None:
    fused = _Layer("self_attention.linear_qkv", "mlp.linear_fc1", identities=("input_layernorm", "pre_mlp_layernorm"))
    found = survey([torch.nn.Sequential(fused)])
    assert found.sites["attn_norm"] == 0 and found.sites["qkv_linear"] == 1
    message = _missing_message(["attn_norm", "mlp_norm", "router_fc1"], found)
    assert "'attn_norm' is an IdentityOp here: the norm is fused into the linear after it, use 'qkv_linear'" in message
    assert "'router_fc1' needs experts with linear_fc1" in message
    assert "This model has self_attn, qkv_linear, mlp_fc1 (" in message


@pytest.mark.parametrize(("num_behind", "expected"), [(0, {1}), (1, {1}), (2, set())])
def test_of_each_name_the_last_group_near_the_end_of_the_chunk_is_kept(num_behind: int, expected: set[int]) -> None:
    chunk = torch.nn.Sequential(_Layer(*DENSE), _Layer(*DENSE), *(_Layer(*MOE) for _ in range(num_behind)))
    assert last_of_each_name(chunk, find_sites(chunk, ("mlp_fc1",))) == expected


NORMS = frozenset(BLOCKS.values())
"""Of a model that has each as a module of its own."""


def config(**settings: Any) -> SimpleNamespace:
    defaults = {
        **{"num_layers": 8, "hidden_size": 64, "recompute_modules": ["core_attn"]},
        **dict.fromkeys(("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"), 2),
        **dict.fromkeys(("tensor_model_parallel_size", "context_parallel_size"), 1),
        **dict.fromkeys(("sequence_parallel", "bf16", "fp16"), False),
        **dict.fromkeys(("recompute_granularity", "recompute_method", "recompute_num_layers")),
    }
    return SimpleNamespace(**{**defaults, **settings})


def recomputing(*modules: str, **settings: Any) -> SimpleNamespace:
    return config(recompute_granularity="selective", recompute_modules=[*modules], **settings)


def block(num_layers: int, **settings: Any) -> SimpleNamespace:
    method = {"recompute_granularity": "full", "recompute_method": "block"}
    return config(**method, recompute_num_layers=num_layers, **settings)


UNIFORM = config(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def gated_delta_net(freq: Any) -> SimpleNamespace:
    return recomputing("gdn_norm_out", linear_attention_freq=freq)


# Recomputed, the name that saves nothing then, and what can be moved instead.
INSTEAD = (
    ("moe_act", "router_fc2", "moe_act"),
    ("layernorm", "qkv_linear", "attn_norm"),
    ("layernorm", "router", "mlp_norm"),
    ("mlp", "mlp_act", "mlp_fc1"),
    ("moe", "router_fc1", "router"),
    ("shared_experts", "shared_fc2", "shared_fc1"),
)


@pytest.mark.parametrize(
    ("chosen", "names", "message"),
    [
        (config(), " ".join(row.name for row in MODULES), ""),
        *(
            (recomputing(module), f"attn_proj {name}", f"'{name}'.*'{module}'.* Offload '{other}', or omit one of the")
            for module, name, other in INSTEAD
        ),
        *((recomputing(module), other, "") for module, _, other in INSTEAD),
        (recomputing("moe"), "router_fc1", "'router_fc1', but.*'expert_fc1' stands for 'router_fc1'"),
        *((gated_delta_net(freq), "attn_proj", "") for freq in (8, [1] * 7 + [0], None)),
        *((gated_delta_net(freq), "attn_proj", "'attn_proj'.*'gdn_norm_out'") for freq in (9, [1] * 8)),
        (config(fused_residual_rmsnorm=True), "qkv_linear qk_norm mtp_norm", ""),
        (config(fused_residual_rmsnorm=True), "mlp_norm", "'mlp_norm'.*fused_residual_rmsnorm=True"),
        (config(moe_shared_expert_overlap=True), "shared_fc1 shared_fc2", ""),
        (config(moe_shared_expert_overlap=True), "shared_experts", "moe_shared_expert_overlap=True.*'shared_fc1'"),
        (config(moe_shared_expert_overlap=False), "shared_experts", ""),
        (UNIFORM, "layer_input", ""),
        (UNIFORM, "layer_input core_attn", "recompute_granularity='full'.*'layer_input'"),
        (block(1), "core_attn", ""),  # layers behind the block still save
        (block(2), "core_attn", "recompute_granularity='full'"),
        (block(2, num_layers_in_first_pipeline_stage=5), "core_attn", ""),
        (block(2, pipeline_model_parallel_layout="Ettttt|tttL"), "core_attn", ""),
    ],
)
def test_names_that_save_nothing_are_refused_and_others_accepted(
    chosen: SimpleNamespace, names: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        check_conflicts(chosen, names.split(), NORMS)


def test_a_recomputed_norm_inside_the_linear_layer_is_none() -> None:
    check_conflicts(recomputing("layernorm"), ["qkv_linear"], NORMS - {"input_layernorm"})


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


def test_why_a_step_has_moved_nothing() -> None:
    cases: list[tuple[dict[str, int], dict[str, Any], str]] = [
        ({}, {}, "offload_min_tensor_bytes=1,048,576"),
        ({"num_kept_groups": 4}, {}, "offload_min_tensor_bytes"),
        ({"num_kept_groups": 4, "managed_bytes": 1 << 20}, {}, "at once"),
        ({"num_kept_groups": 3, "managed_bytes": 1 << 20}, {}, ""),
        ({"managed_bytes": 1 << 20, "copied_out_bytes": 1 << 20}, {}, ""),
        ({}, {"dry_run": True}, ""),
        ({}, {"resident_bytes": 1 << 30}, ""),
        ({"num_groups": 0}, {}, ""),
    ]
    for stats, settings, reason in cases:
        config = OffloadConfig.from_flags(**settings)
        found = why_nothing_moved(IterationStats(**{"num_groups": 4, **stats}), config)
        assert bool(found) == bool(reason) and reason in (found or ""), stats
