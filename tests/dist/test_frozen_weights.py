# SPDX-License-Identifier: Apache-2.0
"""Models of which only a part is trained: the same bits, and no group waits for a backward that does not come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.dist.launch import Pipeline, run_ranks
from tests.dist.parity import Case, run_with, run_without
from tests.dist.settings import DEEP, OVERLAP

NAMES = [
    *("layer_input", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2"),
    *("router", "dispatched_tokens", "moe_act", "router_fc2"),
]


class Adapted(torch.nn.Module):
    """A linear layer of megatron-core with a low-rank adapter beside it."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        size_out, size_in = linear.weight.shape
        self.linear = linear
        self.adapter = torch.nn.Sequential(
            torch.nn.Linear(size_in, 4, bias=False, dtype=linear.weight.dtype),
            torch.nn.Linear(4, size_out, bias=False, dtype=linear.weight.dtype),
        )

    def forward(self, hidden: torch.Tensor) -> Any:
        output, bias = self.linear(hidden)
        return output + self.adapter(hidden), bias


def adapters(chunk: torch.nn.Module) -> None:
    for module in list(chunk.modules()):
        for name, child in list(module.named_children()):
            if name in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"):
                setattr(module, name, Adapted(child))
    _train(chunk, lambda name: ".adapter." in name)


def adapters_and_embedding(chunk: torch.nn.Module) -> None:
    adapters(chunk)
    _train(chunk, lambda name: ".adapter." in name or name.startswith("embedding."))


def all_but_experts(chunk: torch.nn.Module) -> None:
    _train(chunk, lambda name: ".experts." not in name)


def routers(chunk: torch.nn.Module) -> None:
    _train(chunk, lambda name: ".router." in name)


def last_layers(chunk: Any) -> None:
    """Train the last layers only: the input of the first of them needs no gradient."""
    chunk.requires_grad_(False)
    for layer in chunk.decoder.layers:
        layer.requires_grad_(layer.layer_number > layer.config.num_layers // 2)


def _train(chunk: torch.nn.Module, is_trained: Callable[[str], bool]) -> None:
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_(is_trained(name))


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        pytest.param(Pipeline(), [adapters, last_layers, all_but_experts, routers], id="alone"),
        pytest.param(DEEP, [adapters, last_layers], id="interleaved"),
    ],
)
def test_of_a_model_in_part_frozen_only_these_are_trained(shape: Pipeline, changes: list[Any]) -> None:
    settings = {"expert_model_parallel_size": shape.expert}
    cases = [Case("mixed", NAMES, settings=settings, change=change) for change in changes]
    num_frozen = run_ranks(_num_frozen, cases, [2, 3] if shape.size == 1 else [4, 2], pipeline=shape)
    assert all(any(of_ranks) for of_ranks in zip(*num_frozen, strict=True))


def test_adapters_under_the_overlap() -> None:
    """There something must be trained in front of the first layer, with or without offload."""
    case = Case("mixed", NAMES, torch.bfloat16, OVERLAP, wrap=True, change=adapters_and_embedding)
    run_ranks(_num_frozen, [case], [4, 2], pipeline=DEEP)


def _num_frozen(cases: list[Case], microbatches: list[int]) -> list[int]:
    """Check each case; return how many parameters of this rank got no gradient in it."""
    num_frozen = []
    for case in cases:
        expected = run_without(case, microbatches)
        num_frozen.append(list(expected[0].values()).count("none"))
        run_with(case, microbatches, expected, is_evaluated=True, has_report=case is cases[0])
    return num_frozen
