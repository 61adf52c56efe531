# SPDX-License-Identifier: Apache-2.0
"""Losses and every gradient are equal, to the last bit, with and without offload, under megatron-core's schedules.

Each row of a table is a model in a pipeline, with sets of names that are offloaded. Context parallelism needs an
attention kernel of TransformerEngine, which needs a GPU; here the tests' own core attention is in its place
(tests/gpu/test_megatron.py has the real one), all else is megatron-core's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state as ps
from megatron.core.transformer.identity_op import IdentityOp

from megatron_patches import apply
from megatron_patches._model.modules import MODULES, _can_have
from megatron_patches._model.sites import BLOCKS
from megatron_patches._versions import installed_version, is_in_range
from tests.dist.launch import Pipeline, on_ranks, run_ranks
from tests.dist.models import HYBRID, LATENT
from tests.dist.parity import Case, check_all, check_in_turns, run_with, run_without
from tests.dist.settings import DEEP, GROUPED, SHARED, full, is_refused, leaves, selective
from tests.dist.streams import adversarial_device
from tests.dist.tiny import ALL, NUM_LAYERS, make_chunks, make_config, run, stats_of, step
from tests.dist.training import train

ATTENTION = ["layer_input", "attn_norm", "self_attn", "qkv_linear", "core_attn", "attn_proj"]
DENSE = ["mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2"]
EXPERTS = ["router", "dispatched_tokens", "experts", "router_fc1", "moe_act", "router_fc2"]
SHARED_EXPERTS = ["shared_experts", "shared_fc1", "shared_fc2"]
LATENTS = ["mla_down_proj", "qk_norm", "mla_up_proj"]
AHEAD = ["mtp_norm", "mtp_proj"]
MAMBA = ["mamba_mixer", "mamba_in_proj", "mamba_out_proj"]

OVERLAPS_SHARED = {**SHARED, "moe_shared_expert_overlap": True}
SPLIT = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def _cases(kind: str, each: Sequence[Sequence[str]], settings: dict[str, Any] = {}) -> list[Case]:  # noqa: B006
    return [Case(kind, names, settings=settings) for names in each]


def _together(names: list[str]) -> list[list[str]]:
    return [names, leaves(names)]


def _alone(names: list[str]) -> list[list[str]]:
    return [[name] for name in names]


def _check(cases: list[Case], microbatches: list[int], shape: Pipeline) -> None:
    """With expert parallelism, each case has it."""
    if shape.expert > 1:
        experts = {"expert_model_parallel_size": shape.expert}
        cases = [case._replace(settings={**case.settings, **experts}) for case in cases]
    check = check_in_turns if len(microbatches) > 1 else check_all
    run_ranks(check, cases, microbatches, pipeline=shape, timeout_s=240.0)


# ---- schedules -------------------------------------------------------------------------------------------------------

NORMS = selective("layernorm")
IN_FLOATS = [
    Case("dense", ["core_attn", "attn_proj", "mlp_act"], settings=NORMS),
    Case("moe", ["core_attn", "router_fc1", "qkv_linear"]),
]
WRAPPED = [  # as Megatron's training loop has it
    Case("dense", ["core_attn", "qkv_linear", "mlp_act"], torch.bfloat16, wrap=True),
    Case("mixed", ["core_attention", "expert_fc1", "mlp_fc1", "attn_linear"], torch.bfloat16, wrap=True),
    Case("moe", ["core_attn", "router_fc1", "attn_proj"], torch.bfloat16, NORMS, wrap=True),
]
# A stage that only embeds, and one that only computes the loss.
BARE_STAGES = {"num_layers": 2, "pipeline_model_parallel_layout": "E|t|t|L"}
# Above the pipeline's size it allows odd numbers of microbatches.
UNEVEN = {"microbatch_group_size_per_vp_stage": 3}


@pytest.mark.parametrize(
    ("shape", "microbatches", "cases"),
    [
        pytest.param(Pipeline(), [3, 1, 2], [*IN_FLOATS, *WRAPPED], id="no pipeline"),
        pytest.param(Pipeline(2), [2, 5, 1], WRAPPED, id="1F1B"),
        pytest.param(Pipeline(2, 2), [2, 6], WRAPPED, id="interleaved"),
        pytest.param(
            Pipeline(2, 2), [2, 6], _cases("dense", [["core_attn", "qkv_linear"]], BARE_STAGES), id="bare stages"
        ),
        pytest.param(Pipeline(2, 2), [3, 5, 9, 8], _cases("moe", [["core_attn"]], UNEVEN), id="uneven groups"),
    ],
)
def test_schedules(shape: Pipeline, microbatches: list[int], cases: list[Case]) -> None:
    """Microbatches change from step to step, with evaluation before the first step and in between."""
    _check(cases, microbatches, shape)


assert NUM_LAYERS == 4  # one layer in each virtual stage of the deepest pipeline here

# ---- names -----------------------------------------------------------------------------------------------------------


def test_no_name_is_left_out() -> None:
    elsewhere = {"gdp_qkv"}  # in test_newer_layers
    here = [*ALL_OF_MIXED, *LATENTS, *AHEAD, *MAMBA]
    assert {*here} == {row.name for row in MODULES} - elsewhere


ALL_OF_MIXED = [*ATTENTION, *DENSE, *EXPERTS, *SHARED_EXPERTS]
ALL_OF_HYBRID = [*MAMBA, *ATTENTION, *DENSE, *EXPERTS]
MTP = [*ATTENTION, *EXPERTS, "mlp_norm", *AHEAD]
# Without a latent the query has one projection.
ONE_LATENT = {**LATENT, "q_lora_rank": None, "qk_layernorm": False}


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(_cases("mixed", [*_alone(ALL_OF_MIXED), *_together(ALL_OF_MIXED)], SHARED), id="of any model"),
        # They run in pieces, called by the dispatcher between its own steps.
        pytest.param(
            _cases("moe", [["shared_fc1"], ["shared_fc2"], ["shared_fc1", "shared_fc2", *EXPERTS]], OVERLAPS_SHARED),
            id="shared experts that overlap",
        ),
        pytest.param(_cases("moe", [*_alone(EXPERTS[1:]), *_together(EXPERTS)], GROUPED), id="grouped experts"),
        pytest.param(
            [
                *_cases("mixed", [*_alone(["qkv_linear", *LATENTS]), *_together([*ATTENTION, *LATENTS])], LATENT),
                *_cases("mixed", [["mla_down_proj", "mla_up_proj"]], ONE_LATENT),
            ],
            id="latents",
        ),
        pytest.param(_cases("moe", [*_alone(AHEAD), *_together(MTP)], {"mtp_num_layers": 2}), id="further tokens"),
        # Each layer is Mamba, attention, a dense MLP or experts, and nothing else.
        pytest.param(_cases("moe", [*_alone([*MAMBA, *DENSE]), *_together(ALL_OF_HYBRID)], HYBRID), id="hybrid"),
    ],
)
def test_names(cases: list[Case]) -> None:
    _check(cases, [2], Pipeline())


@pytest.mark.parametrize(
    ("shape", "cases"),
    [
        # With one layer in each virtual stage, some chunks hold dense layers only.
        pytest.param(
            DEEP, _cases("mixed", [["mlp_fc1"], ["router_fc1"], leaves(ALL_OF_MIXED)], SHARED), id="of any model"
        ),
        pytest.param(
            DEEP,
            [
                *_cases("moe", [leaves(EXPERTS)], {"moe_token_dispatcher_type": "allgather"}),
                *_cases("moe", [["shared_fc1", *leaves(EXPERTS)]], OVERLAPS_SHARED),
                *_cases("moe", [EXPERTS], GROUPED),
            ],
            id="experts",
        ),
        pytest.param(
            DEEP,
            [
                *_cases("mixed", [[*ATTENTION, *LATENTS]], LATENT),
                *_cases("moe", [["core_attn"], leaves(MTP)], {"mtp_num_layers": 2}),
            ],
            id="latents and further tokens",
        ),
        pytest.param(Pipeline(2, expert=2), _cases("moe", [leaves(ALL_OF_HYBRID)], HYBRID), id="hybrid"),
        # Some stages hold experts, and some Mamba layers.
        pytest.param(
            DEEP,
            _cases("moe", [["mamba_in_proj", "router_fc1"], ALL_OF_HYBRID], {**HYBRID, "num_layers": 8}),
            id="hybrid, virtual stages",
            marks=pytest.mark.skipif(
                not find_spec("megatron.core.models.hybrid"), reason="HybridModel, of 0.19.2, has virtual stages first"
            ),
        ),
    ],
)
def test_names_in_a_pipeline(shape: Pipeline, cases: list[Case]) -> None:
    _check(cases, [4], shape)


@on_ranks()
def test_one_storage_that_several_modules_save_moves_once() -> None:
    """The input of the router is that of the shared experts."""
    cases = _cases("moe", [["router"], ["shared_fc1"], ["router", "shared_fc1"]], SHARED)
    expected = run_without(cases[0], [1])
    router, shared, both = (run_with(case, [1], expected)[0].copied_out_bytes for case in cases)
    assert 0 < shared < router == both


# ---- recomputation ---------------------------------------------------------------------------------------------------


def _left_to_move(kind: str, settings: dict[str, Any]) -> list[str]:
    """List names that such a model has and that do not conflict with its recomputation."""
    defaults = {
        "multi_latent_attention": False,
        "mtp_num_layers": None,
        "moe_shared_expert_intermediate_size": None,
        "num_moe_experts": 4,
        "moe_layer_freq": 1 if kind == "moe" else [0, 1],
    }
    config = SimpleNamespace(**{**defaults, **settings})
    names = []
    for row in MODULES:
        has = _can_have(config, row) and not row.name.startswith(("mamba_", "gdp_"))
        if row.name == "qk_norm":
            has = config.multi_latent_attention
        if has and not is_refused(config, row.name, frozenset(BLOCKS.values())):
            names.append(row.name)
    assert len(names) > 4
    return names


def _recomputing(kind: str, settings: dict[str, Any]) -> list[Case]:
    return _cases(kind, _together(_left_to_move(kind, settings)), settings)


ONE_MODULE = {
    "core_attn": ("mixed", {}),
    "layernorm": ("mixed", SHARED),
    "mlp": ("mixed", SHARED),
    "moe": ("mixed", SHARED),
    "shared_experts": ("moe", SHARED),
    "moe_act": ("moe", {**GROUPED, **SHARED}),
    "mla_up_proj": ("mixed", LATENT),
}
SEVERAL = selective("core_attn", "layernorm", "shared_experts", "moe_act", **GROUPED, **SHARED)
# With MTP, models of 0.18 raise, with or without offload.
WITH_MTP = (
    [] if is_in_range(installed_version(), "==0.18.*") else _cases("moe", [["layer_input"]], full(mtp_num_layers=1))
)
HYBRID_FULL = [
    *_cases("moe", [["layer_input"]], full(**HYBRID)),
    *_cases("moe", [["layer_input", "mamba_mixer", "router_fc1"]], full(2, "block", **HYBRID, num_layers=8)),
]
if not find_spec("megatron.core.recompute"):  # before 0.18 such models recompute nothing
    HYBRID_FULL.clear()


@pytest.mark.parametrize(
    ("shape", "cases"),
    [
        *(
            pytest.param(Pipeline(), _recomputing(kind, selective(module, **model)), id=f"selective, {module}")
            for module, (kind, model) in ONE_MODULE.items()
        ),
        pytest.param(
            DEEP,
            [*_recomputing("moe", SEVERAL)[:1], *_recomputing("mixed", selective("moe", **SHARED))[:1]],
            id="selective, in a pipeline",
        ),
        # The input of a recomputed layer, or of a block of layers, is all that is saved.
        pytest.param(
            Pipeline(),
            [
                *_cases("mixed", [["layer_input"]], full()),
                *_cases("mixed", [["layer_input", "layer_input"]], full(2)),  # there is one group for two layers
                *_cases("mixed", [["layer_input", "core_attn", "router_fc1"]], full(2, "block")),
                *WITH_MTP,
                *HYBRID_FULL,
            ],
            id="full",
        ),
        pytest.param(
            DEEP,
            [*_cases("moe", [["layer_input"]], full(**GROUPED)), *WITH_MTP, *HYBRID_FULL[:1]],
            id="full, in a pipeline",
        ),
    ],
)
def test_recomputation(shape: Pipeline, cases: list[Case]) -> None:
    """Recomputed modules run their forward inside backward, where the engine is passive."""
    _check(cases, [2] if shape.size == 1 else [4], shape)


@on_ranks()
def test_discarded_tensors_are_never_copied() -> None:
    """The bits do not tell: what was copied of it is not what its backward reads."""
    discarded = {
        "core_attn": ("mixed", selective("mla_up_proj", **LATENT)),
        "experts": ("moe", selective("layernorm")),
    }
    for name, (kind, settings) in discarded.items():
        case = Case(kind, [name], settings=settings)
        expected = run_without(case, [2])
        with adversarial_device(1) as device:
            (stats,) = run_with(case, [2], expected)
            assert device.hazards == [], (name, device.hazards)
        assert stats.copied_out_bytes > 0


@on_ranks()
def test_the_input_of_a_projection_with_the_norm_inside() -> None:
    """As TransformerEngine's: recomputed norms are those in front of the experts, and this one discards nothing."""

    def make() -> list[torch.nn.Module]:
        chunks: list[Any] = make_chunks(make_config("moe", **NORMS))
        for layer in chunks[0].decoder.layers:
            layer.input_layernorm, layer.recompute_input_layernorm = IdentityOp(), False
        return chunks

    expected = step(make(), 2)
    with apply(ALL, modules=["qkv_linear"]) as handle:
        assert step(chunks := make(), 2) == expected
        assert chunks and stats_of(handle).copied_out_bytes > 0


# ---- parallelism within a stage --------------------------------------------------------------------------------------

OF_LAYERS = ["layer_input", "qkv_linear", "core_attn", "attn_proj", *DENSE]


@pytest.mark.parametrize(
    ("shape", "cases"),
    [
        # Without sequence parallelism, too.
        pytest.param(
            Pipeline(tensor=2),
            [
                *_cases("dense", [["qkv_linear"], ["mlp_fc1"], OF_LAYERS, ["self_attn", "mlp_act"]], SPLIT),
                *_cases("dense", [OF_LAYERS], {"tensor_model_parallel_size": 2}),
            ],
            id="sequence parallel",
        ),
        pytest.param(Pipeline(2, 2, tensor=2), _cases("dense", [OF_LAYERS], SPLIT), id="the same in a pipeline"),
        # Each rank has a part of every sequence, and meets the others in the core attention.
        pytest.param(
            Pipeline(context=2),
            [
                *_cases("dense", [OF_LAYERS, ["core_attn"]]),
                *_cases("dense", [["layer_input", "mlp_act"]], selective("core_attn")),
            ],
            id="context parallel",
        ),
        pytest.param(
            Pipeline(2, 2, expert=2, context=2),
            _cases("mixed", [[*OF_LAYERS, "dispatched_tokens", "moe_act"]]),
            id="context parallel, in a pipeline",
        ),
        pytest.param(
            Pipeline(expert=2, context=2),
            [
                Case(
                    "moe",
                    [*OF_LAYERS[:5], "dispatched_tokens", "moe_act"],
                    torch.bfloat16,
                    {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": is_delayed},
                    wrap=True,
                )
                for is_delayed in (False, True)
            ],
            id="context parallel, under the overlap",
        ),
        pytest.param(Pipeline(expert=2), _cases("moe", [["core_attn", "router_fc1", "moe_act"]]), id="expert parallel"),
    ],
)
def test_parallelism(shape: Pipeline, cases: list[Case]) -> None:
    _check(cases, [2 * shape.size], shape)


def test_the_stand_in_for_context_parallel_attention() -> None:
    """Two ranks that share every sequence learn what one rank with whole sequences learns."""
    (whole,) = run_ranks(_losses, pipeline=Pipeline())
    first, second = run_ranks(_losses, pipeline=Pipeline(context=2))
    # megatron-core has multiplied the losses by the number of ranks; what is reduced in bf16 differs in its last bits
    assert [(a + b) / 4 for a, b in zip(first, second, strict=True)] == pytest.approx(whole, rel=2e-3)
    assert whole[-1] < whole[0] - 0.05 and first != second


def _losses() -> list[float]:
    return _train("dense", {}, lambda chunks: sum(run(chunks, 2)) / 2)


@pytest.mark.parametrize(
    ("shape", "world_size", "kind", "names"),
    [
        (Pipeline(), 2, "dense", ["mlp_fc1"]),
        (Pipeline(context=2), 2, "dense", ["mlp_fc1"]),
        (Pipeline(2, 2, expert=2), 4, "moe", ["router_fc1", "moe_act"]),
    ],
)
@on_ranks(timeout_s=240.0)
def test_distributed_optimizer(shape: Pipeline, world_size: int, kind: str, names: list[str]) -> None:
    """Gradients are reduced during the backward, and parameters gathered during the next forward."""
    number = 2 * ps.get_pipeline_model_parallel_world_size()
    settings: dict[str, Any] = {"expert_model_parallel_size": shape.expert}
    expected = _train(kind, settings, lambda chunks: step(chunks, number))
    with apply(ALL) as handle:
        asked = {"offload_activation": True, "offload_modules": ["layer_input", "core_attn", "attn_proj", *names]}
        got = _train(kind, {**settings, **asked}, lambda chunks: step(chunks, number))
        stats = stats_of(handle)
        assert (stats.copied_out_bytes > 0) == (stats.num_groups > stats.num_kept_groups)
    assert got == expected
    assert expected[0] != expected[-1], "nothing was learned"


def _train(kind: str, settings: dict[str, Any], step: Callable[[list[Any]], Any]) -> list[Any]:
    config = make_config(kind, torch.bfloat16, **settings)
    return train(config, make_chunks(config), step)
