# SPDX-License-Identifier: Apache-2.0
"""The table of module names: what is understood, where it is found, and what is said where it is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402

from megatron_patches._hooks.attach import last_of_each_name  # noqa: E402
from megatron_patches._model.modules import canonical_names  # noqa: E402
from megatron_patches._model.sites import find_sites, survey  # noqa: E402
from megatron_patches._model.unshared import unshared_modules  # noqa: E402
from megatron_patches._model.validate import _missing_message  # noqa: E402


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


ATTENTION = (
    "input_layernorm",
    "self_attention.linear_qkv",
    "self_attention.core_attention",
    "self_attention.linear_proj",
)
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


LINEARS = {"mlp.experts.linear_fc1", "mlp.experts.linear_fc2"}
SPARSE = (*ATTENTION, "pre_mlp_layernorm", "mlp.router", *LINEARS, "mlp.shared_experts.linear_fc1")
QKV, KERNEL, PROJ = ATTENTION[1:]
NORMS = ("input_layernorm", "pre_mlp_layernorm")


@pytest.mark.parametrize(
    ("names", "unshared"),
    [
        ("qkv_linear attn_norm", {KERNEL, PROJ, "pre_mlp_layernorm", "mlp"}),
        ("layer_input", {KERNEL, PROJ, "pre_mlp_layernorm", "mlp"}),
        ("mlp_norm", {"input_layernorm", "self_attention", *LINEARS}),
        ("core_attn", {*NORMS, QKV, "mlp"}),
        ("attn_proj moe_act", {*NORMS, QKV, "mlp.router", *LINEARS}),
        ("router_fc1", {*NORMS, "self_attention", "mlp.router", "mlp.experts.linear_fc2"}),
        ("dispatched_tokens attn_proj", {"input_layernorm", QKV, "mlp.experts.linear_fc2"}),
        ("shared_fc1 self_attn", LINEARS),
        ("experts", {*NORMS, "self_attention", "mlp.router"}),
        ("mlp_act", {*NORMS, "self_attention", "mlp"}),
    ],
)
def test_submodules_that_share_nothing_with_the_names(names: str, unshared: set[str]) -> None:
    assert _unshared(_Layer(*SPARSE), names.split()) == unshared


@pytest.mark.parametrize(
    ("setting", "names", "differing"),
    [
        ("use_transformer_engine_op_fuser", "mlp_norm", LINEARS),  # the fused operations of experts call no linears
        ("fused_residual_rmsnorm", "router_fc1", set(NORMS)),  # such a norm runs its hooks twice
    ],
)
def test_settings_under_which_hooks_do_not_run_once(setting: str, names: str, differing: set[str]) -> None:
    called = _unshared(_Layer(*SPARSE), [names])
    assert differing <= called and _unshared(_Layer(*SPARSE), [names], {setting: True}) == called - differing


def test_under_the_overlap_the_mlp_is_not_called_but_its_parts_are() -> None:
    layer = _Layer(*SPARSE, identities=("cross_attention",))
    called, in_a_plan = _unshared(layer, ["qkv_linear"]), _unshared(layer, ["qkv_linear"], PLAN)
    assert (called - in_a_plan, in_a_plan - called) == ({"mlp"}, {"mlp.router", "mlp.experts"})
    assert _unshared(layer, ["router_fc1"], PLAN) == _unshared(layer, ["router_fc1"])
    assert "mlp" in _unshared(_Layer(*DENSE), ["qkv_linear"], PLAN)


PLAN = {"overlap_moe_expert_parallel_comm": True}


def _unshared(layer: _Layer, names: list[str], settings: dict[str, bool] | None = None) -> set[str]:
    chunk: Any = _Holder(layer)
    chunk.config = SimpleNamespace(**{"overlap_moe_expert_parallel_comm": False, **(settings or {})})
    paths = {module: path for path, module in layer.named_modules()}
    found = [paths[module] for module in unshared_modules(chunk, names)]
    assert len(found) == len(set(found))
    return set(found)


def test_an_identity_is_no_site_and_is_said_to_be_fused() -> None:
    fused = _Layer("self_attention.linear_qkv", "mlp.linear_fc1", identities=("input_layernorm", "pre_mlp_layernorm"))
    found = survey([_Holder(fused)])
    assert found.sites["attn_norm"] == 0 and found.sites["qkv_linear"] == 1
    message = _missing_message(["attn_norm", "mlp_norm", "router_fc1"], found)
    assert "'attn_norm' is an IdentityOp here: the norm is fused into the linear after it, use 'qkv_linear'" in message
    assert "'router_fc1' needs experts with linear_fc1" in message
    assert "This model has self_attn, qkv_linear, mlp_fc1 (" in message


@pytest.mark.parametrize(("num_behind", "expected"), [(0, {1}), (1, {1}), (2, set())])
def test_of_each_name_the_last_group_near_the_end_of_the_chunk_is_kept(num_behind: int, expected: set[int]) -> None:
    chunk = torch.nn.Sequential(_Layer(*DENSE), _Layer(*DENSE), *(_Layer(*MOE) for _ in range(num_behind)))
    assert last_of_each_name(chunk, find_sites(chunk, ("mlp_fc1",))) == expected


class _Holder(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer
