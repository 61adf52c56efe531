# SPDX-License-Identifier: Apache-2.0
"""Every module name of TransformerEngine's layers, alone, together, and beside what is recomputed: the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from operator import eq
from typing import Any

import pytest

from megatron_patches._model.modules import MODULES
from tests.dist.settings import full, is_refused, leaves, selective
from tests.gpu.parity import RELEASED_AT_ONCE, Bits, deterministic_algorithms, run_twice
from tests.gpu.ranks import GpuRanks

NUM_LAYERS = 4  # the last groups of a name stay, if they are in one of the last two
NUM_MICROBATCHES = 2

EXPERTS: dict[str, Any] = {"num_moe_experts": 4}
SHARED: dict[str, Any] = {**EXPERTS, "moe_shared_expert_intermediate_size": 256}
MIXED: dict[str, Any] = {**SHARED, "moe_layer_freq": [0, 1] * (NUM_LAYERS // 2)}
LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_head_dim": 64,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 64,
    "rope_type": "rope",
}
FP8: dict[str, Any] = {"fp8": "hybrid"}

MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "norms of query and key": {"qk_layernorm": True},
    "mixed": MIXED,
    "one linear layer for each expert": {**EXPERTS, "moe_grouped_gemm": False},
    "shared experts that overlap": {**SHARED, "moe_shared_expert_overlap": True},
    "allgather": {**EXPERTS, "moe_token_dispatcher_type": "allgather"},
    "latent attention": {**MIXED, **LATENT},
    "latent attention with norms": {**LATENT, "qk_layernorm": True},
    "latent attention, one query projection": {**LATENT, "q_lora_rank": None},
    "multi-token prediction": {**EXPERTS, "mtp_num_layers": 2},
    "hybrid": {**SHARED, "is_hybrid_model": True, "num_layers": 2 * NUM_LAYERS},
    "FP8, current scaling": {**MIXED, **FP8, "fp8_recipe": "tensorwise"},
    "FP8, delayed scaling": {**MIXED, **FP8, "fp8_recipe": "delayed"},
    "FP8, block scaling": {**MIXED, **FP8, "fp8_recipe": "blockwise"},
}

MAMBA: dict[str, Any] = {**MODELS["hybrid"], "mamba_num_heads": 8}

needs_mamba = pytest.mark.skipif(
    not find_spec("mamba_ssm"),
    reason="needs mamba_ssm and causal_conv1d, which are not installed: pip install 'mamba-ssm[causal-conv1d]'",
)
RECOMPUTED = [
    *(pytest.param(selective(module, **MIXED), id=module) for module in ("core_attn", "layernorm", "mlp", "moe")),
    *(pytest.param(selective(module, **SHARED), id=module) for module in ("shared_experts", "moe_act")),
    pytest.param(selective("mla_up_proj", **MIXED, **LATENT), id="mla_up_proj"),
    pytest.param(selective("core_attn", "layernorm", "shared_experts", "moe_act", **SHARED), id="several"),
    *(
        pytest.param(full(number, method, **MIXED, **fp8), id=f"full, {method}, {'FP8' if fp8 else 'bf16'}")
        for number, method in ((1, "uniform"), (2, "block"))
        for fp8 in ({}, FP8)  # there TransformerEngine's function recomputes the layers
    ),
    pytest.param(full(**MAMBA), id="full, Mamba layers", marks=needs_mamba),
]


def test_no_name_is_left_out(ranks_of: Callable[[int], GpuRanks]) -> None:
    """But those of Mamba layers, whose kernels may be missing, and of layers that only megatron-core 0.20 has."""
    models = [settings for model, settings in MODELS.items() if model != "hybrid"]  # it has no name of its own
    (names,) = ranks_of(1).run(_names_of_all, models)
    assert names == {row.name for row in MODULES if not row.name.startswith("mamba_")} - {"gdp_qkv"}


@pytest.mark.parametrize("model", [*MODELS, pytest.param("Mamba", marks=needs_mamba)])
def test_each_name_alone_and_all_together(model: str, ranks_of: Callable[[int], GpuRanks]) -> None:
    if model == "hybrid" and not find_spec("megatron.core.models.hybrid"):
        pytest.skip("needs HybridModel: runs with megatron-core 0.19")
    ranks_of(1).run(_check_each_name, {**MODELS, "Mamba": MAMBA}[model])


@pytest.mark.parametrize("settings", RECOMPUTED)
def test_recomputation(settings: dict[str, Any], ranks_of: Callable[[int], GpuRanks]) -> None:
    ranks_of(1).run(_check_together, settings)


def _names_of_all(models: Sequence[dict[str, Any]]) -> set[str]:
    return {name for settings in models for name in _names(settings)}


def _names(settings: dict[str, Any]) -> list[str]:
    """List names that such a model has and that do not conflict with its recomputation."""
    from megatron_patches._model.sites import own_norms, survey

    config, chunks = _make(settings)
    sites, norms = survey(chunks).sites, own_norms(chunks)
    if config.recompute_granularity == "full":
        sites["layer_input"] = len(chunks)
    return [name for name, count in sites.items() if count and not is_refused(config, name, norms)]


def _check_each_name(settings: dict[str, Any]) -> None:
    names = _names(settings)
    _check(settings, [*([name] for name in names), *_together(names)])


def _check_together(settings: dict[str, Any]) -> None:
    names = _names(settings)
    assert names
    _check(settings, _together(names))


def _together(names: list[str]) -> list[list[str]]:
    return [names] if leaves(names) in (names, []) else [names, leaves(names)]


def _check(settings: dict[str, Any], each: Sequence[list[str]]) -> None:
    from megatron_patches import apply

    wrong = {}
    with deterministic_algorithms(warn_only=True):
        expected = run_twice(lambda: _two_steps(_make(settings)[1]), eq)
        for names in each:
            with apply(RELEASED_AT_ONCE) as handle:
                _, chunks = _make({**settings, "offload_activation": True, "offload_modules": names})
                got = _two_steps(chunks)
                stats = handle.stats  # gone with the chunks
            assert stats is not None and stats.num_groups > 0 == stats.num_storages_left
            assert (stats.copied_out_bytes > 0) == (stats.num_groups > stats.num_kept_groups), names
            differ = [name for a, b in zip(expected, got, strict=True) for name in a if a[name] != b[name]]
            if differ:
                wrong[tuple(names)] = differ[:3]
    assert not wrong, f"steps differ from those without offload: {wrong}"


def _two_steps(chunks: list[Any]) -> Bits:
    """Without an optimizer: the second plans with what the first has seen."""
    from tests.gpu.small_gpt import fingerprint_of_step

    return [fingerprint_of_step(chunks, NUM_MICROBATCHES) for _ in range(2)]


def _make(settings: dict[str, Any]) -> tuple[Any, list[Any]]:
    from tests.gpu.small_gpt import make_chunks, make_config

    config = make_config(**{"num_layers": NUM_LAYERS, **settings})
    return config, make_chunks(config)
