# SPDX-License-Identifier: Apache-2.0
"""Losses and every gradient are equal, to the last bit, with and without offload, under megatron-core's schedules.

Each row of the table is a pipeline, numbers of microbatches, and models with sets of names that are offloaded. Context
parallelism needs an attention kernel of TransformerEngine, which needs a GPU; here the tests' own core attention is in
its place (tests/gpu/test_megatron.py has the real one), all else is megatron-core's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from megatron_patches import apply
from megatron_patches._model.modules import MODULES, _can_have
from megatron_patches._model.sites import BLOCKS
from megatron_patches._versions import installed_version, is_in_range
from tests.dist.launch import Pipeline, on_ranks, run_ranks
from tests.dist.models import HYBRID, LATENT, adapters, adapters_and_embedding, all_but_experts, last_layers, routers
from tests.dist.parity import EXPERTS, Case, check_all
from tests.dist.settings import DEEP, GROUPED, OVERLAP, SHARED, full, is_refused, leaves, selective
from tests.dist.tiny import ALL, make_chunks, make_config, stats_of, step, train_distributed

ATTENTION = ["layer_input", "attn_norm", "self_attn", "qkv_linear", "core_attn", "attn_proj"]
DENSE = ["mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2"]
ROUTED = ["router", "dispatched_tokens", "experts", *EXPERTS]
SHARED_EXPERTS = ["shared_experts", "shared_fc1", "shared_fc2"]
LATENTS = ["mla_down_proj", "qk_norm", "mla_up_proj"]
AHEAD = ["mtp_norm", "mtp_proj"]
MAMBA = ["mamba_mixer", "mamba_in_proj", "mamba_out_proj"]
ALL_OF_MIXED = [*ATTENTION, *DENSE, *ROUTED, *SHARED_EXPERTS]
ALL_OF_HYBRID = [*MAMBA, *ATTENTION, *DENSE, *ROUTED]
ALL_AHEAD = [*ATTENTION, *ROUTED, "mlp_norm", *AHEAD]
OF_LAYERS = ["layer_input", "qkv_linear", "core_attn", "attn_proj", *DENSE]
OF_FROZEN = [*OF_LAYERS, "router", "dispatched_tokens", "moe_act", "router_fc2"]
OF_EXPERTS = [*OF_LAYERS[:5], "dispatched_tokens", "moe_act"]

# A stage that only embeds, and one that only computes the loss.
BARE = {"num_layers": 2, "pipeline_model_parallel_layout": "E|t|t|L"}
# Above the pipeline's size it allows odd numbers of microbatches.
UNEVEN = {"microbatch_group_size_per_vp_stage": 3}

# In pieces, called by the dispatcher between its own steps.
OVERLAPS_SHARED = {**SHARED, "moe_shared_expert_overlap": True}
SPLIT = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
MTP = {"mtp_num_layers": 2}
# Without a latent the query has one projection.
ONE_LATENT = {**LATENT, "q_lora_rank": None, "qk_layernorm": False}
NORMS = selective("layernorm")
DELAYED = {"delay_wgrad_compute": True}
WITH_BOTH = {**LATENT, **GROUPED}


def test_no_name_is_left_out() -> None:
    elsewhere = {"gdp_qkv"}  # in test_newer_layers
    assert {*ALL_OF_MIXED, *LATENTS, *AHEAD, *MAMBA} == {row.name for row in MODULES} - elsewhere


def _cases(kind: str, each: Sequence[Sequence[str]], settings: dict[str, Any] = {}) -> list[Case]:  # noqa: B006
    return [Case(kind, names, settings=settings) for names in each]


def _wrapped(kind: str, each: Sequence[Sequence[str]], settings: dict[str, Any] = {}) -> list[Case]:  # noqa: B006
    """As Megatron's training loop has the model."""
    return [Case(kind, names, torch.bfloat16, settings, wrap=True) for names in each]


def _overlap(kind: str, each: Sequence[Sequence[str]], settings: dict[str, Any] = {}) -> list[Case]:  # noqa: B006
    """Under the all-to-all overlap."""
    return _wrapped(kind, each, {**OVERLAP, **SHARED, **settings})


def _frozen(*changes: Callable[[Any], None]) -> list[Case]:
    return [Case("mixed", OF_FROZEN, change=change) for change in changes]


def _together(names: list[str]) -> list[list[str]]:
    return [names, leaves(names)]


def _alone(names: list[str]) -> list[list[str]]:
    return [[name] for name in names]


def _left_to_move(kind: str, settings: dict[str, Any]) -> list[str]:
    """List names that such a model has and that do not conflict with its recomputation."""
    defaults: dict[str, Any] = dict.fromkeys(("mtp_num_layers", "moe_shared_expert_intermediate_size"))
    defaults |= {"num_moe_experts": 4, "moe_layer_freq": 1 if kind == "moe" else [0, 1]}
    config = SimpleNamespace(**{**defaults, "multi_latent_attention": False, **settings})
    rows = [row for row in MODULES if _can_have(config, row) and not row.name.startswith(("mamba_", "gdp_"))]
    own = [row.name for row in rows if row.name != "qk_norm" or config.multi_latent_attention]
    names = [name for name in own if not is_refused(config, name, frozenset(BLOCKS.values()))]
    assert len(names) > 4
    return names


def _recomputing(kind: str, settings: dict[str, Any]) -> list[Case]:
    return _cases(kind, _together(_left_to_move(kind, settings)), settings)


OF_TRAINING = [
    *_wrapped("dense", [["core_attn", "qkv_linear", "mlp_act"]]),
    *_wrapped("mixed", [["core_attention", "expert_fc1", "mlp_fc1", "attn_linear"]]),
    *_wrapped("moe", [["core_attn", "router_fc1", "attn_proj"]], NORMS),
]
# With MTP, models of 0.18 raise, with or without offload.
MTP_FULL = (
    [] if is_in_range(installed_version(), "==0.18.*") else _cases("moe", [["layer_input"]], full(mtp_num_layers=1))
)
HYBRID_FULL = [
    *_cases("moe", [["layer_input"]], full(**HYBRID)),
    *_cases("moe", [["layer_input", "mamba_mixer", "router_fc1"]], full(2, "block", **HYBRID, num_layers=8)),
]
if not find_spec("megatron.core.recompute"):  # before 0.18 such models recompute nothing
    HYBRID_FULL.clear()
SELECTIVE = {
    "core_attn": ("mixed", {}),
    "layernorm": ("mixed", SHARED),
    "mlp": ("mixed", SHARED),
    "moe": ("mixed", SHARED),
    "shared_experts": ("moe", SHARED),
    "moe_act": ("moe", {**GROUPED, **SHARED}),
    "mla_up_proj": ("mixed", LATENT),
}
SEVERAL = selective("core_attn", "layernorm", "shared_experts", "moe_act", **GROUPED, **SHARED)
OF_OVERLAP = ["layer_input", "attn_norm", "self_attn", *OF_LAYERS[1:], *SHARED_EXPERTS, *ROUTED]
MANY_IN_OVERLAP = [
    *_overlap("mixed", [leaves(OF_OVERLAP)]),
    *_overlap("moe", [[name for name in OF_OVERLAP if name not in DENSE[1:]]]),
    *_overlap("mixed", [["self_attn", *DENSE, "shared_experts", *EXPERTS]], DELAYED),
    *_overlap("mixed", [["qkv_linear", "router", "dispatched_tokens", "experts"]], DELAYED),
]
RECOMPUTING_IN_OVERLAP = [
    *_overlap("mixed", [["core_attn", "router_fc1"]], selective("layernorm")),
    *_overlap("mixed", [["self_attn", "router_fc1"]], selective("mlp", "shared_experts")),
    *_overlap("moe", [["layer_input", "mlp_norm", "router"]], selective("core_attn")),
    # Attention's backward may run before the experts' forward.
    *_overlap(
        "moe", [["layer_input", "self_attn", "router", *EXPERTS]], {"ep_overlap_early_attn_memory_release": True}
    ),
]


class Row(NamedTuple):
    """Models in a pipeline, and numbers of microbatches of their steps."""

    shape: Pipeline
    microbatches: list[int]
    cases: list[Case]


def _row(shape: Pipeline, *cases: list[Case], microbatches: Sequence[int] = ()) -> Row:
    """With expert parallelism, each case has it."""
    experts = {"expert_model_parallel_size": shape.expert} if shape.expert > 1 else {}
    all_cases = [case._replace(settings={**case.settings, **experts}) for each in cases for case in each]
    return Row(shape, list(microbatches) or [2 * shape.size], all_cases)


ROWS = {
    # -- schedules: microbatches change from step to step, with evaluation before the first step and in between
    "no pipeline": _row(
        Pipeline(),
        _cases("dense", [["core_attn", "attn_proj", "mlp_act"]], NORMS),
        _cases("moe", [["core_attn", "router_fc1", "qkv_linear"]]),
        OF_TRAINING,
        microbatches=[3, 1, 2],
    ),
    "1F1B": _row(Pipeline(2), OF_TRAINING, microbatches=[2, 5, 1]),
    "interleaved": _row(Pipeline(2, 2), OF_TRAINING, microbatches=[2, 6]),
    "bare stages": _row(Pipeline(2, 2), _cases("dense", [["core_attn", "qkv_linear"]], BARE), microbatches=[2, 6]),
    "uneven groups": _row(Pipeline(2, 2), _cases("moe", [["core_attn"]], UNEVEN), microbatches=[3, 5, 9, 8]),
    # -- names
    "names of any model": _row(Pipeline(), _cases("mixed", [*_alone(ALL_OF_MIXED), *_together(ALL_OF_MIXED)], SHARED)),
    "names of experts": _row(
        Pipeline(),
        _cases("moe", [["shared_fc1"], ["shared_fc2"], ["shared_fc1", "shared_fc2", *ROUTED]], OVERLAPS_SHARED),
        _cases("moe", [*_alone(ROUTED[1:]), *_together(ROUTED)], GROUPED),
    ),
    "names of latents": _row(
        Pipeline(),
        _cases("mixed", [*_alone(["qkv_linear", *LATENTS]), *_together([*ATTENTION, *LATENTS])], LATENT),
        _cases("mixed", [["mla_down_proj", "mla_up_proj"]], ONE_LATENT),
    ),
    "names of further tokens": _row(Pipeline(), _cases("moe", [*_alone(AHEAD), *_together(ALL_AHEAD)], MTP)),
    # Each layer is Mamba, attention, a dense MLP or experts, and nothing else.
    "names of a hybrid": _row(
        Pipeline(), _cases("moe", [*_alone([*MAMBA, *DENSE]), *_together(ALL_OF_HYBRID)], HYBRID)
    ),
    # With one layer in each virtual stage, some chunks hold dense layers only.
    "names in a pipeline": _row(
        DEEP,
        _cases("mixed", [["mlp_fc1"], ["router_fc1"], leaves(ALL_OF_MIXED)], SHARED),
        _cases("moe", [leaves(ROUTED)], {"moe_token_dispatcher_type": "allgather"}),
        _cases("moe", [["shared_fc1", *leaves(ROUTED)]], OVERLAPS_SHARED),
        _cases("moe", [ROUTED], GROUPED),
        _cases("mixed", [[*ATTENTION, *LATENTS]], LATENT),
        _cases("moe", [["core_attn"], leaves(ALL_AHEAD)], MTP),
    ),
    "hybrid in a pipeline": _row(Pipeline(2, expert=2), _cases("moe", [leaves(ALL_OF_HYBRID)], HYBRID)),
    # -- recomputation: modules run their forward inside backward, where the engine is passive
    "selective": _row(
        Pipeline(), *(_recomputing(kind, selective(module, **model)) for module, (kind, model) in SELECTIVE.items())
    ),
    "selective in a pipeline": _row(
        DEEP, _recomputing("moe", SEVERAL)[:1], _recomputing("mixed", selective("moe", **SHARED))[:1]
    ),
    # The input of a recomputed layer, or of a block of layers, is all that is saved.
    "full": _row(
        Pipeline(),
        _cases("mixed", [["layer_input"]], full()),
        _cases("mixed", [["layer_input", "layer_input"]], full(2)),  # there is one group for two layers
        _cases("mixed", [["layer_input", "core_attn", "router_fc1"]], full(2, "block")),
        MTP_FULL,
        HYBRID_FULL,
    ),
    "full in a pipeline": _row(DEEP, _cases("moe", [["layer_input"]], full(**GROUPED)), MTP_FULL, HYBRID_FULL[:1]),
    # -- parallelism within a stage
    "tensor parallel": _row(
        Pipeline(tensor=2),
        _cases("dense", [["qkv_linear"], ["mlp_fc1"], OF_LAYERS, ["self_attn", "mlp_act"]], SPLIT),
        _cases("dense", [OF_LAYERS], {"tensor_model_parallel_size": 2}),
    ),
    "sequence parallel in a pipeline": _row(Pipeline(2, 2, tensor=2), _cases("dense", [OF_LAYERS], SPLIT)),
    # Each rank has a part of every sequence, and meets the others in the core attention.
    "context parallel": _row(
        Pipeline(context=2),
        _cases("dense", [OF_LAYERS, ["core_attn"]]),
        _cases("dense", [["layer_input", "mlp_act"]], selective("core_attn")),
    ),
    "context parallel in a pipeline": _row(
        Pipeline(2, 2, expert=2, context=2), _cases("mixed", [[*OF_LAYERS, *OF_EXPERTS[5:]]])
    ),
    "context parallel under the overlap": _row(
        Pipeline(expert=2, context=2),
        _wrapped("moe", [OF_EXPERTS], OVERLAP),
        _wrapped("moe", [OF_EXPERTS], {**OVERLAP, **DELAYED}),
    ),
    # -- models of which only a part is trained: no group waits for a backward that does not come
    "frozen": _row(Pipeline(), _frozen(adapters, last_layers, all_but_experts, routers), microbatches=[2, 3]),
    "frozen, in a pipeline": _row(DEEP, _frozen(adapters, last_layers), microbatches=[4, 2]),
    # There something must be trained in front of the first layer, with or without offload.
    "frozen, overlap": _row(
        DEEP,
        [Case("mixed", OF_FROZEN, torch.bfloat16, OVERLAP, True, adapters_and_embedding)],
        microbatches=[4, 2],
    ),
    "expert parallel": _row(Pipeline(expert=2), _cases("moe", [["core_attn", "router_fc1", "moe_act"]])),
    # -- the all-to-all overlap: combined 1F1B, where nodes of two microbatches take turns inside a layer
    "overlap, each name": _row(
        Pipeline(expert=2),
        _overlap("mixed", _alone(OF_OVERLAP)),
        # What was copied in is read once more after autograd has dropped it.
        _overlap("mixed", _alone(["qkv_linear", "attn_proj", *DENSE[1:], "dispatched_tokens", *EXPERTS]), DELAYED),
        _overlap("moe", _alone([*LATENTS, "dispatched_tokens", "experts", *EXPERTS]), WITH_BOTH),
    ),
    "overlap, many names": _row(Pipeline(expert=2), MANY_IN_OVERLAP, microbatches=[3, 1]),
    "overlap, recomputation": _row(Pipeline(expert=2), RECOMPUTING_IN_OVERLAP),
    "overlap in a pipeline": _row(
        DEEP,
        MANY_IN_OVERLAP,
        _overlap("mixed", _alone(["mlp_fc1", "moe_act"])),
        RECOMPUTING_IN_OVERLAP[1::2],
        microbatches=[4, 2],
    ),
    # The layer of further tokens is one more of the plan, whose input is one part of a tensor that is read again.
    "overlap in a pipeline, further tokens": _row(
        DEEP,
        _overlap("moe", [["layer_input", "core_attn", "mlp_norm", *AHEAD, "router_fc1"]], {"mtp_num_layers": 1}),
        microbatches=[2, 4],
    ),
    "overlap in a pipeline, latents": _row(
        DEEP,
        _overlap("mixed", [[*OF_LAYERS[:3], *LATENTS, "mlp_act", *ROUTED[1:]]], WITH_BOTH),
        _overlap("moe", [["self_attn", "router_fc1"]], selective("mla_up_proj", "moe_act", "layernorm", **WITH_BOTH)),
    ),
}
if find_spec("megatron.core.models.hybrid"):  # HybridModel, of 0.19.2, has virtual stages first
    # Some stages hold experts, and some Mamba layers.
    ROWS["hybrid in virtual stages"] = _row(
        DEEP, _cases("moe", [["mamba_in_proj", "router_fc1"], ALL_OF_HYBRID], {**HYBRID, "num_layers": 8})
    )
# 0.16.1 frees the input of an only local expert that its backward needs, with or without offload.
if is_in_range(installed_version(), ">=0.17"):
    one_expert = _overlap("moe", [["router_fc1"]], {"num_moe_experts": 2})
    ROWS["overlap, one expert"] = _row(Pipeline(expert=2), one_expert, microbatches=[3, 1])


# What differs by versions of megatron-core.
COMPAT = ("bare", "interleaved", "names", "selective", "full", "tensor", "overlap in", "overlap, recomputation")


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=pytest.mark.compat if row.startswith(COMPAT) else ()) for row in ROWS]
)
def test_steps_are_those_without_offload(row: str) -> None:
    shape, microbatches, cases = ROWS[row]
    run_ranks(check_all, cases, microbatches, pipeline=shape, timeout_s=240.0)


@pytest.mark.compat
@pytest.mark.parametrize(("shape", "world_size"), [(Pipeline(), 2), (Pipeline(context=2), 2), (DEEP, 4)], ids=str)
@on_ranks(timeout_s=240.0)
def test_distributed_optimizer(shape: Pipeline, world_size: int) -> None:
    """Gradients are reduced during the backward, and parameters gathered during the next forward."""
    kind, names = ("moe", ["router_fc1", "moe_act"]) if shape == DEEP else ("dense", ["mlp_fc1"])

    def steps(**offload: Any) -> list[dict[str, str]]:
        config = make_config(kind, torch.bfloat16, expert_model_parallel_size=shape.expert, **offload)
        return train_distributed(config, make_chunks(config), lambda chunks: step(chunks, 2 * shape.size))

    expected = steps()
    with apply(ALL) as handle:
        names = ["layer_input", "core_attn", "attn_proj", *names]
        assert steps(offload_activation=True, offload_modules=names) == expected
        stats = stats_of(handle)
        assert (stats.copied_out_bytes > 0) == (stats.num_groups > stats.num_kept_groups)
    assert expected[0] != expected[-1], "nothing was learned"
