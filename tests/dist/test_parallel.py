# SPDX-License-Identifier: Apache-2.0
"""Sequence and context parallelism, and the distributed optimizer with overlapped reductions and gathers.

All to the last bit. Context parallelism needs an attention kernel of TransformerEngine, which needs a GPU; here the
tests' own core attention is in its place (tests/gpu/test_megatron.py has the real one), all else is megatron-core's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_patches import apply
from tests.dist.launch import Pipeline, run_ranks
from tests.dist.parity import Case, check_all
from tests.dist.tiny import ALL, fingerprint, make_chunks, make_config, run
from tests.dist.training import train

NAMES = ["layer_input", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2"]


@pytest.mark.parametrize("pipeline", [Pipeline(tensor=2), Pipeline(2, 2, tensor=2)], ids=str)
def test_sequence_parallel(pipeline: Pipeline) -> None:
    settings = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    cases = [Case("dense", [name], settings=settings) for name in ("qkv_linear", "mlp_fc1")]
    cases += [Case("dense", NAMES, settings=settings), Case("dense", ["self_attn", "mlp_act"], settings=settings)]
    run_ranks(check_all, cases, [2 * pipeline.size], pipeline=pipeline, timeout_s=240.0)


@pytest.mark.parametrize("pipeline", [Pipeline(context=2), Pipeline(2, 2, expert=2, context=2)], ids=str)
def test_context_parallel(pipeline: Pipeline) -> None:
    """Each rank has a part of every sequence, and meets the others in the core attention."""
    settings = {"expert_model_parallel_size": pipeline.expert}
    kinds = {"dense": NAMES, "mixed": [*NAMES, "dispatched_tokens", "moe_act"]}
    cases = [Case("dense", [name]) for name in ("qkv_linear", "core_attn", "attn_proj")]
    cases += [Case(kind, names, settings=settings if kind == "mixed" else {}) for kind, names in kinds.items()]
    cases.append(Case("dense", ["layer_input", "mlp_act"], settings=_recomputing("core_attn")))
    run_ranks(check_all, cases, [2 * pipeline.size], pipeline=pipeline, timeout_s=240.0)


def test_context_parallel_under_the_overlap() -> None:
    overlap = {"overlap_moe_expert_parallel_comm": True, "expert_model_parallel_size": 2}
    names = ["layer_input", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "dispatched_tokens", "moe_act"]
    cases = [Case("moe", names, torch.bfloat16, {**overlap, "delay_wgrad_compute": late}, True) for late in (0, 1)]
    run_ranks(check_all, cases, [4], pipeline=Pipeline(expert=2, context=2))


def test_the_stand_in_for_context_parallel_attention() -> None:
    """Two ranks that share every sequence learn what one rank with whole sequences learns."""
    whole = run_ranks(_losses, pipeline=Pipeline())
    first, second = run_ranks(_losses, pipeline=Pipeline(context=2))
    # megatron-core has multiplied the losses by the number of ranks; what is reduced in bf16 differs in its last bits
    assert [(a + b) / 4 for a, b in zip(first, second, strict=True)] == pytest.approx(whole[0], rel=2e-3)
    assert whole[0][-1] < whole[0][0] - 0.05 and first != second


def _losses() -> list[float]:
    losses: list[float] = []
    _train("dense", 2, {}, losses)
    return losses


@pytest.mark.parametrize(
    ("pipeline", "world_size", "kind"),
    [
        (Pipeline(), 2, "dense"),
        (Pipeline(context=2), 2, "dense"),
        (Pipeline(2, 2, expert=2), 4, "moe"),
    ],
)
def test_distributed_optimizer_with_overlap(pipeline: Pipeline, world_size: int, kind: str) -> None:
    """Gradients are reduced during the backward, and parameters gathered during the next forward."""
    run_ranks(_check_steps, kind, pipeline, pipeline=pipeline, world_size=world_size, timeout_s=240.0)


def _check_steps(kind: str, pipeline: Pipeline) -> None:
    settings = {"expert_model_parallel_size": pipeline.expert}
    expected = _train(kind, 2 * pipeline.size, settings)
    names = ["layer_input", "core_attn", "attn_proj", *(["router_fc1", "moe_act"] if kind == "moe" else ["mlp_fc1"])]
    with apply(ALL) as handle:
        asked = {"offload_activation": True, "offload_modules": names}
        got = _train(kind, 2 * pipeline.size, {**settings, **asked})
        assert handle.stats is not None
        has_left = handle.stats.num_groups > handle.stats.num_kept_groups
        assert (handle.stats.copied_out_bytes > 0) == has_left
    assert got == expected
    assert expected[0] != expected[-1], "nothing was learned"


def _recomputing(module: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": [module]}


def _train(
    kind: str, num_microbatches: int, settings: dict[str, Any], mean_losses: list[float] | None = None
) -> list[dict[str, str]]:
    """Run three steps; return what each leaves in the gradients' buffers, and its losses."""

    def step(chunks: list[Any]) -> dict[str, str]:
        losses = run(chunks, num_microbatches)
        if mean_losses is not None:
            mean_losses.append(sum(losses) / len(losses))
        return fingerprint(chunks, losses)

    config = make_config(kind, torch.bfloat16, **settings)
    return train(config, make_chunks(config), step)
