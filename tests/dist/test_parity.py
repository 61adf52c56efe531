# SPDX-License-Identifier: Apache-2.0
"""Losses and every gradient are equal, to the last bit, with and without offload, under megatron-core's schedules."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from megatron_patches import apply
from tests.dist.launch import Pipeline, on_ranks, run_ranks
from tests.dist.parity import Case, check_all, check_in_turns, run_without
from tests.dist.tiny import ALL, NUM_LAYERS, make_chunks, make_config, step

SHAPES = [Pipeline(), Pipeline(2), Pipeline(2, 2)]
MICROBATCHES = {1: [3, 1, 2], 2: [2, 5, 1], 4: [2, 6]}  # by number of stages in all
DENSE = ["qkv_linear", "core_attn", "attn_proj", "attn_norm", "mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2", "self_attn"]


# Every combination of model, type and recomputation, with the modules of the main job where the model has them.
def _grid() -> Iterable[Case]:
    names = {
        "dense": ["core_attn", "qkv_linear", "mlp_act"],
        "moe": ["core_attn", "router_fc1", "qkv_linear"],
        "mixed": ["core_attention", "expert_fc1", "mlp_fc1", "attn_linear"],
    }
    for kind in names:
        for dtype in (torch.float32, torch.bfloat16):
            yield Case(kind, names[kind], dtype, wrap=dtype is torch.bfloat16)
            recompute = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
            kept = [name for name in names[kind] if name not in ("qkv_linear", "mlp_fc1")]
            yield Case(kind, [*kept, "attn_proj"], dtype, recompute)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bitwise_equal(shape: Pipeline) -> None:
    """Microbatches change from step to step, with evaluation before the first step and in between."""
    cases = [case for case in _grid() if case.dtype is torch.bfloat16 or shape.size == 1]
    run_ranks(check_in_turns, cases, _microbatches(shape), pipeline=shape)


def test_recomputation() -> None:
    """Recomputed modules run their forward inside backward, where the engine is passive. See test_recompute_modes."""
    selective = {"recompute_granularity": "selective"}
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    cases = [
        Case("dense", ["self_attn", "mlp_fc2"], settings={**selective, "recompute_modules": ["core_attn"]}),
        Case("mixed", ["self_attn"], settings={**selective, "recompute_modules": ["mlp", "moe", "layernorm"]}),
        Case("mixed", ["layer_input"], settings=full),
        Case("dense", ["layer_input"], settings=full, dtype=torch.bfloat16, wrap=True),
        Case("dense", ["layer_input", "core_attn"], settings={**full, "recompute_method": "block"}),
    ]
    run_ranks(check_all, cases, [2, 5], pipeline=Pipeline(2))


def test_stages_without_layers() -> None:
    """A stage that only embeds, and one that only computes the loss."""
    settings = {"num_layers": 2, "pipeline_model_parallel_layout": "E|t|t|L"}
    cases = [
        Case("dense", ["core_attn", "qkv_linear"], settings=settings),
        Case("dense", ["attn_norm"], settings=settings),
    ]
    run_ranks(check_all, cases, [2, 6], pipeline=Pipeline(2, 2))


def test_uneven_groups_of_microbatches() -> None:
    """`microbatch_group_size_per_vp_stage` above the pipeline's size allows odd numbers of microbatches."""
    settings = {"microbatch_group_size_per_vp_stage": 3}
    run_ranks(check_all, [Case("moe", ["core_attn"], settings=settings)], [3, 5, 9, 8], pipeline=Pipeline(2, 2))


def test_tensor_parallel() -> None:
    """Without sequence parallelism, which needs norms that run on GPUs only."""
    cases = [Case("dense", [*DENSE[:3], "mlp_norm", "mlp_act"], settings={"tensor_model_parallel_size": 2})]
    run_ranks(check_all, cases, [1, 3], pipeline=Pipeline(tensor=2))


def test_expert_parallel() -> None:
    cases = [Case("moe", ["core_attn", "router_fc1", "moe_act"], settings={"expert_model_parallel_size": 2})]
    run_ranks(check_all, cases, [1, 3], pipeline=Pipeline(expert=2))


@on_ranks(Pipeline(2))
def test_two_models_take_turns() -> None:
    """As in reinforcement learning: each has an engine of its own, and goes with its model."""
    cases = [Case("dense", ["core_attn"]), Case("moe", ["router_fc1", "mlp_norm"])]
    expected = [run_without(case, [4])[0] for case in cases]
    with apply(ALL) as handle:
        settings = [{"offload_activation": True, "offload_modules": list(case.names)} for case in cases]
        models = [make_chunks(make_config(case.kind, **more)) for case, more in zip(cases, settings, strict=True)]
        engines = set()
        for _ in range(2):
            for chunks, wanted in zip(models, expected, strict=True):
                assert step(chunks, 4) == wanted
                engines.add(id(handle.engine))
        assert len(engines) == 2
        models.clear()
        del chunks
        assert not handle._runtime._attachments


def _microbatches(shape: Pipeline) -> list[int]:
    return MICROBATCHES[shape.size * (shape.virtual or 1)]


assert NUM_LAYERS == 4  # one layer in each virtual stage of the deepest pipeline here
