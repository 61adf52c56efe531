# SPDX-License-Identifier: Apache-2.0
"""The table of module names: what is understood, where it is found, and what is said where it is not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("megatron.core")

import torch  # noqa: E402
from megatron.core.ssm.mamba_layer import MambaLayer  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402

from megatron_patches.__main__ import module_table  # noqa: E402
from megatron_patches._hooks.attach import last_of_each_name  # noqa: E402
from megatron_patches._model.modules import MODULES, canonical_names, drop_parts, known_names, row_of  # noqa: E402
from megatron_patches._model.sites import (  # noqa: E402
    Site,
    count_layers,
    find_sites,
    merge_surveys,
    survey,
)
from megatron_patches._model.unshared import unshared_modules  # noqa: E402
from megatron_patches._model.validate import _missing_message  # noqa: E402
from offload_engine import ChunkKey  # noqa: E402
from offload_engine.schedule import backward_at_once, interleaved, no_pipelining, one_forward_one_backward  # noqa: E402

USER_NAMES = "core_attn core_attention qkv_linear attn_linear router_fc1 router_fc2 shared_fc1 shared_fc2 self_attn"
MEGATRON_NAMES = "attn_norm qkv_linear core_attn attn_proj mlp_norm expert_fc1 moe_act"
OWN_NAMES = (
    "mlp_fc1 mlp_act mlp_fc2 router layer_input dispatched_tokens experts fused_group_mlp mla_down_proj mla_up_proj "
    "qk_norm mtp_norm mtp_proj mamba_mixer mamba_in_proj mamba_out_proj gdp_qkv expert_fc2 "
    "shared_experts"
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


def _other(kind: type[torch.nn.Module], *paths: str) -> torch.nn.Module:
    """Return a layer of another kind, made the same way."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    for path in paths:
        _put(layer, path, _Part())
    return layer


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
GROUPED = ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2")


@pytest.mark.parametrize("name", f"{USER_NAMES} {MEGATRON_NAMES} {OWN_NAMES}".split())
def test_every_promised_name_is_known(name: str) -> None:
    assert row_of(name).name in canonical_names([name])


def test_two_vocabularies_name_the_same_thing() -> None:
    assert canonical_names(["expert_fc1", "router_fc1"]) == ("router_fc1",)
    assert canonical_names(["attn_linear", "core_attention"]) == canonical_names(["core_attn", "attn_proj"])


def test_no_name_stands_twice() -> None:
    assert len(set(known_names())) == len(known_names())


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown module name 'core_atn'.*core_attn, core_attention.*router_fc1"):
        canonical_names(["core_attn", "core_atn"])


def test_parts_of_a_requested_name_are_left_out() -> None:
    names = canonical_names(["self_attn", "core_attn", "mlp_fc1", "attn_proj"])
    assert drop_parts(names) == (("self_attn", "mlp_fc1"), ("core_attn", "attn_proj"))


def test_recompute_modules_and_parts_exist() -> None:
    known = {"core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out"}
    known |= {"gdp_in_proj", "mhc"}
    for row in MODULES:
        assert {*row.recomputed_by, *row.discarded_by, *row.input_of} <= known
        assert {*row.input_of} <= {*row.recomputed_by}
        assert {*row.parts} <= {other.name for other in MODULES}


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


def test_grouped_experts_are_one_site() -> None:
    assert find_sites(_Holder(_Layer(*GROUPED)), ("router_fc1", "moe_act")) == [
        Site("router_fc1", "layer.mlp.experts.linear_fc1", None, layer=0),
        Site("moe_act", "layer.mlp.experts.linear_fc1", "layer.mlp.experts.linear_fc2", layer=0),
    ]


def test_dispatched_tokens_reach_from_the_router_to_the_experts_and_into_them() -> None:
    assert find_sites(_Holder(_Layer("mlp.router", "mlp.experts", *GROUPED)), ("dispatched_tokens",)) == [
        Site("dispatched_tokens", "layer.mlp.router", "layer.mlp.experts", layer=0, is_before_experts=True),
        Site("dispatched_tokens", "layer.mlp.experts.linear_fc1", None, layer=0),
    ]


LINEARS = {"mlp.experts.linear_fc1", "mlp.experts.linear_fc2"}
SPARSE = (*ATTENTION, "pre_mlp_layernorm", "mlp.router", *LINEARS, "mlp.shared_experts.linear_fc1")
QKV, KERNEL, PROJ = ATTENTION[1:]
NORMS = ("input_layernorm", "pre_mlp_layernorm")


@pytest.mark.parametrize(
    ("names", "unshared"),
    [
        (["qkv_linear", "attn_norm"], {KERNEL, PROJ, "pre_mlp_layernorm", "mlp"}),
        (["layer_input"], {KERNEL, PROJ, "pre_mlp_layernorm", "mlp"}),
        (["mlp_norm"], {"input_layernorm", "self_attention", *LINEARS}),
        (["core_attn"], {*NORMS, QKV, "mlp"}),
        (["attn_proj", "moe_act"], {*NORMS, QKV, "mlp.router", *LINEARS}),
        (["router_fc1"], {*NORMS, "self_attention", "mlp.router", "mlp.experts.linear_fc2"}),
        (["router_fc2"], {*NORMS, "self_attention", "mlp.router", "mlp.experts.linear_fc1"}),
        (["dispatched_tokens", "attn_proj"], {"input_layernorm", QKV, "mlp.experts.linear_fc2"}),
        (["shared_fc1", "self_attn"], LINEARS),
        (["experts"], {*NORMS, "self_attention", "mlp.router"}),
        (["mlp_act"], {*NORMS, "self_attention", "mlp"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_submodules_that_share_nothing_with_the_names(names: list[str], unshared: set[str]) -> None:
    assert _unshared(_Layer(*SPARSE), names) == unshared


def test_under_the_overlap_the_mlp_is_not_called_but_its_parts_are() -> None:
    layer = _Layer(*SPARSE, identities=("cross_attention",))
    called, in_a_plan = _unshared(layer, ["qkv_linear"]), _unshared(layer, ["qkv_linear"], PLAN)
    assert (called - in_a_plan, in_a_plan - called) == ({"mlp"}, {"mlp.router", "mlp.experts"})
    assert _unshared(layer, ["router_fc1"], PLAN) == _unshared(layer, ["router_fc1"])
    assert "mlp" in _unshared(_Layer(*DENSE), ["qkv_linear"], PLAN)


def test_a_layer_with_none_of_the_places_shares_nothing() -> None:
    second = [path for path in EXPERTS if path.endswith("fc2")]
    assert _unshared(_Layer(*DENSE), ["router_fc1"]) == {*NORMS, "self_attention", "mlp"}
    assert _unshared(_Layer(*MOE), ["router_fc1"]) == {*NORMS, "self_attention", "mlp.router", *second}


def test_the_fused_operations_of_experts_do_not_call_their_linears() -> None:
    for names in (["mlp_norm"], ["core_attn", "moe_act"], ["qkv_linear"]):
        layer, called = _Layer(*SPARSE), _unshared(_Layer(*SPARSE), names)
        assert _unshared(layer, names, {"use_transformer_engine_op_fuser": True}) == called - LINEARS


def test_a_norm_that_is_fused_with_the_residual_connection_runs_its_hooks_twice() -> None:
    layer, called = _Layer(*SPARSE), _unshared(_Layer(*SPARSE), ["router_fc1"])
    assert _unshared(layer, ["router_fc1"], {"fused_residual_rmsnorm": True}) == called - set(NORMS)


def test_attention_that_looks_for_its_keys_reads_what_the_projections_read() -> None:
    layer = _Layer(*DENSE, f"{KERNEL}.indexer")
    assert _unshared(layer, ["core_attn"]) == {*NORMS, "mlp"}
    assert _unshared(layer, ["qkv_linear"]) == {"pre_mlp_layernorm", "mlp"}
    assert "self_attention" in _unshared(layer, ["mlp_norm"])


@pytest.mark.parametrize("path", ["self_attention", KERNEL])
def test_of_attention_that_is_not_megatron_cores_nothing_is_known(path: str) -> None:
    class Other(_Part):
        """It may get more than query, key and value."""

        __module__ = __name__

    layer = _Layer(*DENSE)
    layer.get_submodule(path).__class__ = Other
    assert _unshared(layer, ["core_attn"]) == {*NORMS, "mlp"}


def test_of_a_layer_that_is_not_megatron_cores_nothing_is_known() -> None:
    class Parallel(_Layer):
        """Attention and MLP may read one tensor here."""

        __module__ = __name__

    assert _unshared(Parallel(*SPARSE), ["qkv_linear"]) == set()


PLAN = {"overlap_moe_expert_parallel_comm": True}


def _unshared(layer: _Layer, names: list[str], settings: dict[str, bool] | None = None) -> set[str]:
    chunk = _Holder(layer)
    chunk.config = SimpleNamespace(**{"overlap_moe_expert_parallel_comm": False, **(settings or {})})
    paths = {module: path for path, module in layer.named_modules()}
    found = [paths[module] for module in unshared_modules(chunk, names)]
    assert len(found) == len(set(found))
    return set(found)


def test_modules_that_share_tensors_are_in_the_table() -> None:
    rows = {row.name: row for row in MODULES}
    for row in MODULES:
        for name in row.shares_with or ():
            assert row.name in (rows[name].shares_with or (row.name,)), (
                f"{row.name} shares with {name}, not the reverse"
            )


def test_latent_projections_have_names_of_their_own_and_a_common_one() -> None:
    paths = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj")
    fused = ("linear_qkv_down_proj",)
    layer = _Layer(*(f"self_attention.{path}" for path in (*paths, *fused, "q_layernorm", "kv_layernorm")))
    counts = survey([layer]).sites
    assert (counts["qkv_linear"], counts["mla_down_proj"], counts["mla_up_proj"], counts["qk_norm"]) == (5, 3, 2, 2)
    assert drop_parts(canonical_names(["qkv_linear", "mla_up_proj"])) == (("qkv_linear",), ("mla_up_proj",))


def test_mamba_layers() -> None:
    layer = _other(MambaLayer, "norm", "mixer", "mixer.in_proj", "mixer.norm", "mixer.out_proj")
    counts = survey([torch.nn.Sequential(layer)]).sites
    assert {name: count for name, count in counts.items() if count} == dict.fromkeys(
        ("mamba_mixer", "mamba_in_proj", "mamba_out_proj"), 1
    )
    assert count_layers(torch.nn.Sequential(layer, _Layer(*DENSE))) == 2
    layer.mixer.__class__ = type("GatedDeltaProductMixer", (_Part,), {})
    assert survey([torch.nn.Sequential(layer)]).sites["gdp_qkv"] == 1


@pytest.mark.parametrize("inner", ["transformer_layer", "mtp_model_layer"])
def test_a_layer_that_predicts_a_token_more_and_the_layer_inside_it(inner: str) -> None:
    ahead = _other(MultiTokenPredictionLayer, "enorm", "hnorm", "eh_proj", "final_layernorm")
    ahead.add_module(inner, _Layer(*DENSE))
    chunk = torch.nn.Sequential(_Layer(*DENSE), ahead)
    found = find_sites(chunk, ("mtp_norm", "mtp_proj", "core_attn"))
    assert [site.path for site in found] == [
        "0.self_attention.core_attention",
        "1.enorm",
        "1.hnorm",
        "1.final_layernorm",
        "1.eh_proj",
        f"1.{inner}.self_attention.core_attention",
    ]
    assert count_layers(chunk) == 2, "recomputation runs the two together"


def test_dense_names_do_not_match_experts_nor_the_reverse() -> None:
    counts = survey([_Layer(*MOE)]).sites
    assert (counts["mlp_fc1"], counts["mlp_act"], counts["router_fc1"], counts["moe_act"]) == (0, 0, 3, 3)
    counts = survey([_Layer(*DENSE)]).sites
    assert (counts["mlp_fc1"], counts["mlp_act"], counts["router_fc1"], counts["router"]) == (1, 1, 0, 0)


def test_an_identity_is_no_site_and_is_said_to_be_fused() -> None:
    fused = _Layer("self_attention.linear_qkv", "mlp.linear_fc1", identities=("input_layernorm", "pre_mlp_layernorm"))
    found = survey([_Holder(fused)])
    assert found.sites["attn_norm"] == 0 and found.sites["qkv_linear"] == 1
    message = _missing_message(["attn_norm", "mlp_norm", "router_fc1"], found)
    assert "'attn_norm' is an IdentityOp here: the norm is fused into the linear after it, use 'qkv_linear'" in message
    assert "use 'mlp_fc1'" in message
    assert "'router_fc1' needs experts with linear_fc1" in message
    assert "This model has self_attn, qkv_linear, mlp_fc1 (" in message
    assert "'expert_fc1' stands for 'router_fc1'" in message


def test_surveys_of_several_ranks_add_up() -> None:
    merged = merge_surveys([survey([_Layer(*DENSE)]), survey([]), survey([_Layer(*MOE)])])
    assert (merged.sites["core_attn"], merged.sites["mlp_fc1"], merged.sites["moe_act"]) == (2, 1, 3)


def test_last_group_of_each_name() -> None:
    chunk = torch.nn.Sequential(_Layer(*DENSE), _Layer(*DENSE))
    assert last_of_each_name(chunk, find_sites(chunk, ("qkv_linear", "core_attn"))) == {2, 3}
    assert last_of_each_name(chunk, []) == frozenset()


@pytest.mark.parametrize(("num_behind", "expected"), [(0, {1}), (1, {1}), (2, set())])
def test_kept_sites_are_near_the_end_of_their_chunk(num_behind: int, expected: set[int]) -> None:
    chunk = torch.nn.Sequential(_Layer(*DENSE), _Layer(*DENSE), *(_Layer(*MOE) for _ in range(num_behind)))
    assert last_of_each_name(chunk, find_sites(chunk, ("mlp_fc1",))) == expected


def test_kept_sites_of_a_model_with_mtp_are_in_the_mtp_layer() -> None:
    ahead = _other(MultiTokenPredictionLayer, "enorm", "hnorm", "eh_proj", "final_layernorm")
    ahead.transformer_layer = _Layer(*DENSE)
    chunk = torch.nn.Sequential(_Layer(*DENSE), _Layer(*MOE), ahead)
    sites = find_sites(chunk, ("router", "mlp_fc1", "mtp_proj"))
    places = {sites[ordinal].path for ordinal in last_of_each_name(chunk, sites)}
    assert places == {"2.eh_proj", "2.transformer_layer.mlp.linear_fc1"}


def test_chunks_whose_backward_comes_at_once() -> None:
    assert backward_at_once(no_pipelining(3)) == {ChunkKey(0, 0), ChunkKey(0, 1), ChunkKey(0, 2)}
    assert backward_at_once(one_forward_one_backward(2, 1, 2)) == {ChunkKey(0, 0), ChunkKey(0, 1)}
    assert backward_at_once(one_forward_one_backward(2, 0, 3)) == set()
    assert {key.stage for key in backward_at_once(interleaved(2, 1, 2, 4))} == {1}


def test_chunks_whose_backward_comes_at_once_where_forwards_and_backwards_are_combined() -> None:
    """F0 | F1 B0 | F2 B1 | B2: each backward runs together with the next forward."""
    combined = no_pipelining(3, overlap_expert_comm=True)
    assert backward_at_once(combined) == set()
    assert backward_at_once(combined, is_combined=True) == {ChunkKey(0, 0), ChunkKey(0, 1), ChunkKey(0, 2)}
    assert backward_at_once(no_pipelining(1, overlap_expert_comm=True), is_combined=True) == {ChunkKey(0, 0)}
    last = interleaved(2, 1, 2, 4, overlap_expert_comm=True)
    assert backward_at_once(last, is_combined=True) == {ChunkKey(1, microbatch) for microbatch in range(4)}
    assert backward_at_once(interleaved(2, 0, 2, 4, overlap_expert_comm=True), is_combined=True) == set()


def test_printed_table_has_every_name_and_submodule() -> None:
    printed = module_table()
    for row in MODULES:
        for text in (row.name, *row.aliases, *(span.path for span in row.spans)):
            assert text in printed


class _Holder(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer
