# SPDX-License-Identifier: Apache-2.0
"""Recomputation switched between two steps, layer by layer: the same bits, fewer saved bytes."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_patches import apply
from megatron_patches._model.candidates import find_candidates
from megatron_patches._model.modules import drop_parts
from megatron_patches._model.recompute import Switches
from megatron_patches._model.recompute_options import RecomputeOptions
from megatron_patches._model.sites import find_sites
from megatron_patches._versions import installed_version, is_in_range
from offload_engine import ResidencyMeter
from offload_engine._budget.module_runs import ModuleRuns
from offload_engine.planning.choices import Choices, Slot
from offload_engine.planning.shapes import ChunkShape, GroupShape
from tests.dist.launch import Pipeline, on_ranks
from tests.dist.models import LATENT
from tests.dist.settings import DEEP, GROUPED, SHARED, full, selective
from tests.dist.tiny import (
    ALL,
    HIDDEN,
    MICRO_BATCH,
    SEQUENCE,
    check_bits,
    forward_step,
    make_chunks,
    make_config,
    run,
    stats_of,
    step,
)

NO_BIAS = {"add_bias_linear": False}
INPUT = SEQUENCE * MICRO_BATCH * HIDDEN * 4  # bytes of a hidden activation
DROPOUT = {"attention_dropout": 0.1}

# What is recomputed -> kind of the model, its settings, and names to offload beside it.
MODELS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "dense": ("dense", NO_BIAS, ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_fc1", "mlp_act", "mlp_fc2"]),
    "dropout": ("dense", {**NO_BIAS, **DROPOUT}, ["core_attn", "attn_proj", "mlp_act"]),
    "experts": ("mixed", SHARED, ["core_attn", "mlp_norm", "router", "dispatched_tokens", "moe_act", "router_fc2"]),
    "shared": ("mixed", SHARED, ["self_attn", "shared_experts", "experts", "mlp_act"]),
    "grouped": ("moe", {**GROUPED, **SHARED}, ["router_fc1", "moe_act", "router_fc2", "shared_fc1", "shared_fc2"]),
    "latent": ("mixed", LATENT, ["mla_down_proj", "qk_norm", "mla_up_proj", "core_attn", "attn_proj", "mlp_fc2"]),
    "spread": ("dense", {"distribute_saved_activations": True}, ["core_attn", "mlp_act"]),
}
NORMS = {"input_layernorm", "pre_mlp_layernorm"}
OFFERED = dict.fromkeys(("dense", "dropout"), {*NORMS, "core_attn", "mlp"})
OFFERED |= dict.fromkeys(("experts", "shared"), {*OFFERED["dense"], "moe", "shared_experts"})
OFFERED |= {
    "grouped": {*NORMS, "core_attn", "moe", "shared_experts", "moe_act"},
    "latent": {"mla_up_proj", "mlp", "moe"},  # norms are of several operations, and the kernel is one of the tests'
    "spread": {*NORMS, "core_attn"},  # beside biases no MLP
}


@pytest.mark.compat
@pytest.mark.parametrize("model", MODELS)
@on_ranks(timeout_s=240.0)
def test_steps_are_the_same_whatever_is_recomputed(model: str) -> None:
    """Each recomputation is on alone beside offload, which saves fewer bytes."""
    kind, settings, names = MODELS[model]
    chunks = make_chunks(_config(kind, settings))
    reference = _step(chunks, 2)
    switches = Switches(chunks)
    assert {name for _, _, name in switches.by_key} == OFFERED[model]
    everything = _saved_bytes(chunks)
    for key in switches.by_key:
        switches.set({key})
        assert _saved_bytes(chunks) < everything, key
    switches.restore()
    assert _saved_bytes(chunks) == everything
    for offloaded in ([], names):
        _check_choices(model, 2, offloaded, reference, has_each=bool(offloaded))


@pytest.mark.parametrize("shape", [Pipeline(2), DEEP], ids=str)
@on_ranks(timeout_s=240.0)
def test_steps_of_a_pipeline_are_the_same(shape: Pipeline) -> None:
    """Stages change nothing about one recomputation alone."""
    model = "grouped" if shape == DEEP else "experts"
    kind, settings, names = MODELS[model]
    _check_choices(model, 4, names, _step(make_chunks(_config(kind, settings)), 4), has_each=False)


def _check_choices(
    model: str, num_microbatches: int, offloaded: list[str], reference: dict[str, str], *, has_each: bool
) -> None:
    """Each recomputation in all layers, then in some; all at once; each second one, in turns."""
    kind, settings, _ = MODELS[model]
    with apply(ALL, modules=offloaded, has_report=False):
        chunks = make_chunks(_config(kind, settings))
        switches = Switches(chunks)
        keys = list(switches.by_key)
        assert {name for _, _, name in keys} <= OFFERED[model]
        choices = [keys, keys[::2], keys[1::2], []]
        for name in OFFERED[model] if has_each else ():
            of_name = [key for key in keys if key[2] == name]
            choices[:0] = [of_name, of_name[1:]]
        for on in map(set, choices):
            switches.set(on)
            assert {key for key, switch in switches.by_key.items() if switch.is_on} == on
            check_bits(reference, _step(chunks, num_microbatches), offloaded, on)
        switches.set(switches.by_key)
        run(chunks, num_microbatches, forward_only=True)
        switches.restore()
        assert _step(chunks, num_microbatches) == reference


def _config(kind: str, settings: dict[str, Any]) -> Any:
    from megatron.core import parallel_state as ps

    expert = ps.get_expert_model_parallel_world_size()
    return make_config(kind, **settings, **({} if kind == "dense" else {"expert_model_parallel_size": expert}))


def _step(chunks: list[torch.nn.Module], num_microbatches: int) -> dict[str, str]:
    model_parallel_cuda_manual_seed(5, force_reset_rng=True)  # of the dropout
    return step(chunks, num_microbatches)


def _saved_bytes(chunks: list[torch.nn.Module]) -> int:
    """Bytes that autograd keeps when the forward of the only microbatch has ended."""
    saved, kept = weakref.WeakSet[torch.Tensor](), list[int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.add(detached := tensor.detach())
        return detached

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = forward_step(*args, **kwargs)
        kept.append(sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in saved}.values()))
        return output

    run(chunks, 1, forward_step=forward)
    return kept[0]


@on_ranks()
def test_of_what_is_recomputed_only_the_input_has_a_group() -> None:
    names = ["mlp_fc1", "mlp_act", "mlp_fc2"]
    meter = ResidencyMeter()
    with apply(ALL, modules=names, meter=meter) as handle:
        chunks = make_chunks(make_config("dense", **NO_BIAS))
        sites = len(find_sites(chunks[0], names))
        switches = Switches(chunks)
        found = []
        for layers in ([], [1], [0, 1, 2, 3], []):
            switches.set({(0, layer, "mlp") for layer in layers})
            meter.reset_peak()
            run(chunks, 2)
            assert stats_of(handle).num_groups == 2 * (sites * (4 - len(layers)) // 4 + len(layers))
            found.append((stats_of(handle).managed_bytes, meter.peak_bytes))
    assert found[0][0] > found[1][0] > found[2][0] == 2 * 4 * INPUT and found[3][0] == found[0][0]


@pytest.mark.compat
@on_ranks()
def test_everything_is_put_back() -> None:
    chunks = make_chunks(make_config("dense", **selective("mlp", **NO_BIAS)))
    switches = Switches(chunks)

    def are_on() -> set[tuple[int, int, str]]:
        return {key for key, switch in switches.by_key.items() if switch.is_on}

    built = are_on()
    others = switches.by_key.keys() - built
    assert {name for _, _, name in built} == {"mlp"}
    switches.set(others)
    assert are_on() == others
    with pytest.raises(KeyError, match="no recomputation can be switched"):
        switches.set({(0, 9, "mlp")})
    assert are_on() == others
    for _ in range(2):
        switches.restore()
        assert are_on() == built
    held = weakref.ref(chunks[0])
    chunks.clear()
    gc.collect()
    assert held() is None and not are_on()
    switches.restore()


PARTS_OF_EXPERTS = ["moe_act", "router_fc2", "shared_fc1", "shared_fc2"]
"""An activation of experts and the shared experts together have all the groups of the MoE layer."""


@pytest.mark.parametrize(("model", "offered"), [("grouped", {"moe_act", "shared_experts"}), ("experts", {"moe"})])
@on_ranks()
def test_each_set_of_offers_is_switched_on_as_it_was_chosen(model: str, offered: set[str]) -> None:
    """Also where the groups of two small recomputations are those of a large one."""
    kind, settings, _ = MODELS[model]
    chunks = make_chunks(_config(kind, settings))
    options = RecomputeOptions(chunks, PARTS_OF_EXPERTS, ModuleRuns().begin)
    offers = options.find(_shapes(PARTS_OF_EXPERTS))
    assert {offer.name for offer in offers} == offered
    for layer in range(4):
        of_layer = [offer for offer in offers if {slot.layer for slot in offer.replaces} == {layer}]
        for number in range(len(of_layer) + 1):
            for chosen in combinations(of_layer, number):
                options.apply(Choices(recomputed=frozenset().union(*(offer.replaces for offer in chosen))))
                on = {(option.switch.layer, option.switch.name) for option in options._options if option.switch.is_on}
                assert on == {(layer, offer.name) for offer in chosen}
    with pytest.raises(ValueError, match="the plan recomputes .*name='mlp_act'.*, which this model cannot switch"):
        options.apply(Choices(recomputed=frozenset({Slot(0, 0, "mlp_act", 0)})))
    options.restore()
    assert not any(option.switch.is_on for option in options._options)


def _shapes(names: Sequence[str]) -> tuple[ChunkShape, ...]:
    """Each group has the same bytes and time."""
    return (ChunkShape(tuple(GroupShape(name, i, nbytes=1 << 30, forward_ms=1.0) for i in range(4) for name in names)),)


@on_ranks()
def test_a_microbatch_without_gradients_changes_nothing_about_what_is_freed() -> None:
    chunks = make_chunks(_config(*MODELS["experts"][:2]))
    names, _ = drop_parts(find_candidates(chunks[0].config, chunks, has_budget=True)[0])
    found = []
    for is_evaluated in (False, True):
        options = RecomputeOptions(chunks, names, ModuleRuns().begin)
        run(chunks, 1)
        if is_evaluated:
            run(chunks, 1, forward_only=True)
        found.append(options.find(_shapes(names)))
    assert found[0] == found[1]
    assert {"mlp", "moe", "core_attn"} <= {offer.name for offer in found[0]}


RECOMPUTED = [*NORMS, "core_attn", "mlp", "moe"]
# Kind of the model, its settings, what is set afterwards, as it cannot be built without a GPU, and the recomputations
# that are refused, by a part of the reason.
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, str]]] = [
    ("mixed", full(), {}, dict.fromkeys(RECOMPUTED, "recomputes whole layers")),
    ("dense", {}, {}, {"mlp": "add_bias_linear"}),
    ("mixed", LATENT, {}, dict.fromkeys(NORMS, "several operations")),
    ("mixed", SHARED, {"fp8": "e4m3"}, dict.fromkeys([*RECOMPUTED, "shared_experts"], "FP8")),
    ("mixed", SHARED, {"fp4": "e2m1"}, {"mlp": "FP8 or FP4"}),
    ("mixed", SHARED, {"cuda_graph_impl": "local"}, {"mlp": "CUDA graph", "moe": "CUDA graph"}),
    ("mixed", SHARED, {"overlap_moe_expert_parallel_comm": True}, {"moe": "all-to-all", "core_attn": "all-to-all"}),
    ("mixed", SHARED, {"overlap_dispatch_backward_with_experts_wgrad": True}, {"moe": "weight gradients"}),
    ("mixed", SHARED, {"moe_shared_expert_overlap": True}, dict.fromkeys(["moe", "shared_experts"], "shared_expert")),
    ("mixed", SHARED, {"moe_shared_expert_gate": True}, {"shared_experts": "moe_shared_expert_gate"}),
    ("mixed", SHARED, {"experimental_attention_variant": "dsa"}, {"core_attn": "'dsa'", "input_layernorm": "'dsa'"}),
    ("mixed", SHARED, {"fused_residual_rmsnorm": True}, dict.fromkeys(NORMS, "fused_residual_rmsnorm")),
    ("mixed", SHARED, {"mlp_chunks_for_training": 2}, {"mlp": "mlp_chunks_for_training"}),
    ("mixed", SHARED, {"moe_paged_stash": True}, {"moe": "moe_paged_stash"}),
    ("mixed", SHARED, {"moe_enable_routing_replay": True}, {"moe": "moe_enable_routing_replay"}),
]
if is_in_range(installed_version(), ">=0.17"):
    REFUSED.append(("mixed", {"moe_router_topk": 3}, {}, {"moe": "does not sort its choice"}))


@pytest.mark.compat
@on_ranks()
def test_what_is_not_safe_is_refused_with_the_reason() -> None:
    for kind, settings, changes, reasons in REFUSED:
        chunks = make_chunks(make_config(kind, **settings))
        vars(chunks[0].config).update(changes)
        _expect_refusals(chunks, reasons)
    for attribute, reason in (("__class__", "not megatron-core's"), ("_with_fused_impl", "fused operations")):
        chunks = make_chunks(make_config("mixed"))
        for layer in chunks[0].decoder.layers:
            theirs = type("TheirMLP", (type(layer.mlp),), {"__module__": "theirs"})
            setattr(layer.mlp, attribute, theirs if attribute == "__class__" else True)
        _expect_refusals(chunks, {"mlp": reason, "moe": reason})


def _expect_refusals(chunks: list[torch.nn.Module], reasons: dict[str, str]) -> None:
    switches = Switches(chunks)
    offered = {name for _, _, name in switches.by_key}
    told = {refusal.name: refusal.reason for refusals in switches.refusals for refusal in refusals}
    lines = RecomputeOptions(chunks, (), ModuleRuns().begin).refusals
    for name, part in reasons.items():
        assert name not in offered and part in told[name], (name, told)
        [line] = [line for line in lines if line.startswith(f"{name} of ")]
        assert re.search(rf"^{name} of \d+ layers?: .*{re.escape(part)}", line), line
