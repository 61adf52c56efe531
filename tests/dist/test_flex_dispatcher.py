# SPDX-License-Identifier: Apache-2.0
"""Offload with the flex dispatcher, whose DeepEP is a stand-in over gloo: the same bits."""

from __future__ import annotations

from typing import Any

import torch

from tests.dist.deep_ep import deep_ep_over_gloo
from tests.dist.launch import Pipeline, on_ranks, run_ranks
from tests.dist.parity import Case, References, run_with, run_without
from tests.dist.settings import DEEP, ON_TWO_RANKS, OVERLAP

FLEX: dict[str, Any] = {**ON_TWO_RANKS, "moe_token_dispatcher_type": "flex", "moe_router_dtype": "fp32"}
EACH = [
    ["router_fc1"],
    ["dispatched_tokens"],
    ["layer_input", "core_attn", "mlp_norm", "router", "dispatched_tokens", "moe_act", "router_fc2"],
]


def test_without_a_pipeline() -> None:
    cases = [Case("moe", names, settings=FLEX) for names in (*EACH, ["router"], ["experts"])]
    cases.append(Case("mixed", EACH[-1], torch.bfloat16, FLEX, wrap=True))
    _check_what_moves(run_ranks(_copied_bytes, cases, [3, 2], pipeline=Pipeline(expert=2)))


def test_under_the_overlap_in_a_pipeline() -> None:
    cases = [Case("moe", names, torch.bfloat16, {**FLEX, **OVERLAP}, wrap=True) for names in EACH]
    _check_what_moves(run_ranks(_copied_bytes, cases, [4], pipeline=DEEP))


def _check_what_moves(copied: list[list[int]]) -> None:
    """With the permuted tokens goes what the dispatcher keeps of its permutation."""
    assert all(0 < tokens < dispatched < total for tokens, dispatched, total, *_ in copied), copied


def _copied_bytes(cases: list[Case], microbatches: list[int]) -> list[int]:
    """Of the last step of each case."""
    references = References()
    with deep_ep_over_gloo():
        steps = [
            run_with(case, microbatches, references.of(case, microbatches), is_evaluated=case is cases[0])
            for case in cases
        ]
    return [counters[-1].copied_out_bytes for counters in steps]


@on_ranks(Pipeline(expert=2))
def test_the_stand_in_computes_what_the_alltoall_dispatcher_does() -> None:
    flex = Case("moe", [], settings=FLEX)
    alltoall = Case("moe", [], settings={**FLEX, "moe_token_dispatcher_type": "alltoall"})
    with deep_ep_over_gloo():
        assert run_without(flex, [2]) == run_without(alltoall, [2])
