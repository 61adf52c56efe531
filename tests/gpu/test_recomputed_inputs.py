# SPDX-License-Identifier: Apache-2.0
"""The cases of megatron-core's own test of its offload, as recipes that are taken over: equal bits, no more memory.

Norms are recomputed, and in models with experts the activation: what leaves are the inputs that these start from, and
what else is named. tests/dist/test_recomputed_inputs.py runs the same without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_patches import Handle
from offload_engine import IterationStats
from tests.dist.launch import Pipeline
from tests.dist.test_recomputed_inputs import UPSTREAM, UPSTREAM_OVERLAP
from tests.gpu.parity import deterministic_algorithms, run_twice
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
    return {
        **SIZES,
        **(EXPERTS if has_experts else {}),
        **(LATENT if has_latents else {}),
        "recompute_granularity": "selective",
        "recompute_modules": ["layernorm", "moe_act"] if has_experts else ["layernorm"],
    }


def _check(settings: dict[str, Any], names: list[str], num_microbatches: int) -> None:
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as incumbent

    from megatron_patches import apply
    from offload_engine import OffloadConfig

    recipe = {"fine_grained_activation_offloading": True, "offload_modules": names, "min_offloaded_tensor_size": 1024}
    with deterministic_algorithms(warn_only=True):
        incumbent.FineGrainedActivationOffloadingInterface.reset_instance()
        _, theirs, _ = _steps({**settings, **recipe}, num_microbatches)
        without = run_twice(lambda: _steps(settings, num_microbatches), lambda a, b: a[0] == b[0])
        with apply(OffloadConfig(), replace_fine_grained=True) as handle:
            got = _steps({**settings, **recipe}, num_microbatches, handle)
    assert got[0] == without[0]
    stats = got[2]
    assert stats is not None and 0 < stats.copied_in_bytes <= stats.copied_out_bytes, stats
    assert (stats.num_storages_left, stats.num_viewed_storages) == (0, 0)
    peaks = without[1], got[1], theirs
    assert got[1] < without[1] and got[1] <= theirs, peaks


def _steps(
    settings: dict[str, Any], num_microbatches: int, handle: Handle | None = None
) -> tuple[list[dict[str, str]], int, IterationStats | None]:
    """Run three steps; return their bits, the peak of allocated memory in the last, and its counters."""
    from tests.dist.tiny import fingerprint
    from tests.gpu.small_gpt import keep_gradients, make_chunks, make_config, run

    chunks, bits, peaks = make_chunks(make_config(**settings)), [], []
    keep_gradients(chunks)  # else the peak is where the last of them is made
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        losses = run(chunks, num_microbatches)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        bits.append(fingerprint(chunks, losses))
    return bits, peaks[-1], None if handle is None else handle.stats  # while the model is there
