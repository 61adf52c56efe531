"""Offload under the all-to-all overlap: combined 1F1B, where nodes of two microbatches take turns inside a layer."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch  # noqa: E402

from tests.dist.launch import Pipeline, run_ranks  # noqa: E402
from tests.dist.parity import EXPERTS, Case, check_all  # noqa: E402

SHAPES = [Pipeline(expert=2), Pipeline(2, 2, expert=2)]
MICROBATCHES = {1: [3, 1, 6, 2], 4: [2, 8, 4]}  # by number of stages in all
ATTENTION = ["layer_input", "attn_norm", "qkv_linear", "core_attn", "attn_proj", "self_attn"]
DENSE = ["mlp_fc1", "mlp_act", "mlp_fc2"]
SETTINGS: dict[str, Any] = {
    "overlap_moe_expert_parallel_comm": True,
    "expert_model_parallel_size": 2,
    "moe_shared_expert_intermediate_size": 32,
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_name_alone_and_all_together(shape: Pipeline) -> None:
    names = [*ATTENTION, "mlp_norm", *DENSE, "shared_fc1", "shared_fc2", "shared_experts", "router", *EXPERTS]
    cases = [_case("mixed", [name]) for name in names]
    cases.append(_case("mixed", [name for name in names if name not in ("self_attn", "shared_experts")]))
    cases.append(_case("moe", [name for name in names if name not in DENSE]))
    run_ranks(check_all, cases, _microbatches(shape), pipeline=shape)


def _case(kind: str, names: list[str], **more: Any) -> Case:
    return Case(kind, names, torch.bfloat16, {**SETTINGS, **more}, wrap=True)


def _microbatches(shape: Pipeline) -> list[int]:
    return MICROBATCHES[shape.size * (shape.virtual or 1)]
