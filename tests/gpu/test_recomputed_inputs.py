# SPDX-License-Identifier: Apache-2.0
"""The cases of megatron-core's own test of its offload, as recipes that are taken over: equal bits, no more memory.

Norms are recomputed, and in models with experts the activation: what leaves are the inputs that these start from, and
what else is named. tests/dist/test_inputs.py runs the same without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.dist.launch import Pipeline
from tests.dist.settings import selective
from tests.dist.test_inputs import UPSTREAM, UPSTREAM_OVERLAP
from tests.gpu.parity import check_bits, check_moved, deterministic_algorithms, run_twice
from tests.gpu.ranks import GpuRanks
from tests.gpu.test_module_names import LATENT

SIZES = {"num_layers": 8, "hidden_size": 1024, "ffn_hidden_size": 2048, "num_attention_heads": 8}
EXPERTS = {"num_moe_experts": 8, "moe_ffn_hidden_size": 1024}
OVERLAP = {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}


@pytest.mark.parametrize(("has_experts", "has_latents", "names"), UPSTREAM)
def test_cases(has_experts: bool, has_latents: bool, names: list[str], ranks_of: Callable[[int], GpuRanks]) -> None:
    ranks_of(1).run(_check, _settings(has_experts, has_latents), names, 1, shape=Pipeline())


@pytest.mark.parametrize(("has_latents", "names"), [case[1:] for case in UPSTREAM_OVERLAP])
def test_cases_of_the_overlap(has_latents: bool, names: list[str], ranks_of: Callable[[int], GpuRanks]) -> None:
    settings = {**_settings(True, has_latents), **OVERLAP}
    ranks_of(2).run(_check, settings, names, 2, shape=Pipeline(expert=2))


def _settings(has_experts: bool, has_latents: bool) -> dict[str, Any]:
    model = {**SIZES, **(EXPERTS if has_experts else {}), **(LATENT if has_latents else {})}
    return selective("layernorm", *(["moe_act"] if has_experts else []), **model)


def _check(settings: dict[str, Any], names: list[str], num_microbatches: int) -> None:
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as incumbent

    from megatron_patches import apply
    from offload_engine import OffloadConfig
    from tests.gpu.small_gpt import steps

    recipe = {"fine_grained_activation_offloading": True, "offload_modules": names, "min_offloaded_tensor_size": 1024}
    with deterministic_algorithms(warn_only=True):
        expected, without = run_twice(
            lambda: steps(_model(settings), [num_microbatches] * 3), lambda a, b: a[0] == b[0]
        )
        incumbent.FineGrainedActivationOffloadingInterface.reset_instance()
        _, theirs = steps(_model(settings, recipe), [num_microbatches] * 3)
        with apply(OffloadConfig(), replace_fine_grained=True) as handle:
            chunks = _model(settings, recipe)
            got, peak = steps(chunks, [num_microbatches] * 3)
            stats = check_moved(handle.stats)  # while the model is there
    check_bits(expected, got)
    assert chunks and stats.num_viewed_storages == 0
    assert peak < without and peak <= theirs, (without, peak, theirs)


def _model(settings: dict[str, Any], recipe: dict[str, Any] = {}) -> list[Any]:  # noqa: B006
    from tests.gpu.small_gpt import keep_gradients, make_chunks, make_config

    chunks = make_chunks(make_config(**settings, **recipe))
    keep_gradients(chunks)  # else the peak is where the last of them is made
    return chunks
