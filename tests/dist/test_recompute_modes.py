# SPDX-License-Identifier: Apache-2.0
"""Each way to recompute, together with every name that it leaves something to move for: the same bits."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.identity_op import IdentityOp

from megatron_patches import apply
from megatron_patches._model.modules import MODULES, _can_have
from megatron_patches._model.sites import BLOCKS
from megatron_patches._versions import installed_version, is_in_range
from tests.dist.launch import Pipeline, on_ranks, run_ranks
from tests.dist.models import HYBRID, LATENT
from tests.dist.names import is_refused, leaves
from tests.dist.parity import Case, check_all, run_with, run_without
from tests.dist.streams import adversarial_device
from tests.dist.tiny import ALL, fingerprint, make_chunks, make_config, run, step

SHAPES = [Pipeline(), Pipeline(2, 2, expert=2)]
SHARED = {"moe_shared_expert_intermediate_size": 32}
GROUPED = {"moe_grouped_gemm": True}

# Module of `recompute_modules` -> model in which it is recomputed.
SELECTIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "core_attn": ("mixed", {}),
    "layernorm": ("mixed", SHARED),
    "mlp": ("mixed", SHARED),
    "moe": ("mixed", SHARED),
    "shared_experts": ("moe", SHARED),
    "moe_act": ("moe", {**GROUPED, **SHARED}),
    "mla_up_proj": ("mixed", LATENT),
}


@pytest.mark.parametrize(("module", "shape"), [(m, SHAPES[0]) for m in SELECTIVE] + [("moe", SHAPES[1])], ids=str)
def test_selective(module: str, shape: Pipeline) -> None:
    kind, model = SELECTIVE[module]
    recompute = {"recompute_granularity": "selective", "recompute_modules": [module]}
    settings = {**model, **recompute, "expert_model_parallel_size": shape.expert}
    names = _left_to_move(kind, settings)
    assert len(names) > 4
    _run(shape, [Case(kind, names, settings=settings), Case(kind, leaves(names), settings=settings)])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_selective_modes_at_once(shape: Pipeline) -> None:
    modules = ["core_attn", "layernorm", "shared_experts", "moe_act"]
    recompute = {"recompute_granularity": "selective", "recompute_modules": modules}
    settings = {**GROUPED, **SHARED, **recompute, "expert_model_parallel_size": shape.expert}
    _run(shape, [Case("moe", _left_to_move("moe", settings), settings=settings)])


@on_ranks()
def test_discarded_tensors_are_never_copied() -> None:
    """The bits do not tell: what was copied of it is not what its backward reads."""
    discarded = {"core_attn": ["mla_up_proj"], "experts": ["layernorm"]}
    for name, modules in discarded.items():
        kind, model = SELECTIVE[modules[0]]
        recompute = {"recompute_granularity": "selective", "recompute_modules": modules}
        case = Case(kind, [name], settings={**model, **recompute})
        expected = run_without(case, [2])
        with adversarial_device(1) as device:
            (stats,) = run_with(case, [2], expected)
            assert device.hazards == [], (name, device.hazards)
        assert stats.copied_out_bytes > 0


@on_ranks()
def test_the_input_of_a_projection_with_the_norm_inside() -> None:
    """As TransformerEngine's: recomputed norms are those in front of the experts, and this one discards nothing."""
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}

    def make() -> list[torch.nn.Module]:
        chunks = make_chunks(make_config("moe", **recompute))
        for layer in chunks[0].decoder.layers:
            layer.input_layernorm, layer.recompute_input_layernorm = IdentityOp(), False
        return chunks

    expected = fingerprint(chunks := make(), run(chunks, 2))
    with apply(ALL, modules=["qkv_linear"]) as handle:
        chunks = make()
        assert step(chunks, 2) == expected
        assert handle.stats is not None and handle.stats.copied_out_bytes > 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_full(shape: Pipeline) -> None:
    """The input of a recomputed layer, or of a block of layers, is all that is saved."""
    uniform = _full(shape, "uniform", 1)
    cases = [
        Case("mixed", ["layer_input"], settings=uniform),
        Case("moe", ["layer_input"], settings={**uniform, **GROUPED}),
    ]
    if not is_in_range(installed_version(), "==0.18.*"):  # where such a model raises, with or without offload
        cases.append(Case("moe", ["layer_input"], settings={**uniform, "mtp_num_layers": 1}))
    if shape.virtual is None:  # otherwise one layer in each stage is all there are
        names = ["layer_input", "core_attn", "router_fc1"]
        cases.append(Case("mixed", names, settings=_full(shape, "block", 2)))
    _run(shape, cases)


@pytest.mark.skipif(
    not find_spec("megatron.core.recompute"), reason="before 0.18 such models recompute nothing: runs with 0.19.2"
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_full_in_hybrid_models(shape: Pipeline) -> None:
    cases = [Case("moe", ["layer_input"], settings={**_full(shape, "uniform", 1), **HYBRID})]
    if shape.virtual is None:
        names = ["layer_input", "mamba_mixer", "router_fc1"]
        cases.append(Case("moe", names, settings={**_full(shape, "block", 2), **HYBRID, "num_layers": 8}))
    _run(shape, cases)


def _full(shape: Pipeline, method: str, num_layers: int) -> dict[str, Any]:
    return {
        "expert_model_parallel_size": shape.expert,
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": num_layers,
    }


def test_two_layers_in_each_checkpoint() -> None:
    settings = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
    run_ranks(check_all, [Case("mixed", ["layer_input", "layer_input"], settings=settings)], [3], pipeline=Pipeline())


def _run(shape: Pipeline, cases: list[Case]) -> None:
    run_ranks(check_all, cases, [2] if shape.size == 1 else [4], pipeline=shape, timeout_s=240.0)


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
    return names
