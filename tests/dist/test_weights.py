# SPDX-License-Identifier: Apache-2.0
"""The weights of a model: looked up in time, never moved, frozen in part, their gradients added by a kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.tensor_parallel import layers

from megatron_patches import apply
from offload_engine import OffloadEngine
from tests.dist.launch import Pipeline, on_ranks, run_ranks
from tests.dist.parity import Case, run_with, run_without
from tests.dist.settings import DEEP, OVERLAP
from tests.dist.tiny import ALL, make_chunks, make_config, run, stats_of, step
from tests.dist.training import train


@pytest.mark.compat
@on_ranks()
def test_a_parameter_that_takes_the_place_of_another_is_known_a_step_later() -> None:
    expected = step(make_chunks(make_config()), 2)
    (chunk,) = chunks = make_chunks(make_config())
    begin = OffloadEngine.begin_iteration
    told: list[list[int]] = []

    def noted(engine: Any, actions: Any, weights: Iterable[torch.Tensor], **more: Any) -> None:
        told.append([tensor.data_ptr() for tensor in weights])
        begin(engine, actions, weights, **more)

    with apply(ALL, modules=["qkv_linear"]), mock.patch.object(OffloadEngine, "begin_iteration", noted):
        run(chunks, 2)
        linear: Any = chunk.decoder.layers[0].self_attention.linear_qkv
        linear.weight = torch.nn.Parameter(linear.weight.detach().clone())
        assert [step(chunks, 2) for _ in range(2)] == [expected, expected]
    assert [linear.weight.data_ptr() in weights for weights in told[1:]] == [False, True]


# -- models of which only a part is trained: no group waits for a backward that does not come --------------------------

NAMES_OF_FROZEN = [
    *("layer_input", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2"),
    *("router", "dispatched_tokens", "moe_act", "router_fc2"),
]


class Adapted(torch.nn.Module):
    """A linear layer of megatron-core with a low-rank adapter beside it."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        size_out, size_in = linear.weight.shape
        options: Any = {"bias": False, "dtype": linear.weight.dtype}
        self.linear = linear
        self.adapter = torch.nn.Sequential(
            torch.nn.Linear(size_in, 4, **options), torch.nn.Linear(4, size_out, **options)
        )

    def forward(self, hidden: torch.Tensor) -> Any:
        output, bias = self.linear(hidden)
        return output + self.adapter(hidden), bias


def adapters(chunk: torch.nn.Module, *more: str) -> None:
    for module in list(chunk.modules()):
        for name, child in list(module.named_children()):
            if name in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"):
                setattr(module, name, Adapted(child))
    _train_only(chunk, ".adapter.", *more)


def adapters_and_embedding(chunk: torch.nn.Module) -> None:
    adapters(chunk, "embedding.")


def routers(chunk: torch.nn.Module) -> None:
    _train_only(chunk, ".router.")


def last_layers(chunk: Any) -> None:
    """Train the last layers only: the input of the first of them needs no gradient."""
    chunk.requires_grad_(False)
    for layer in chunk.decoder.layers:
        layer.requires_grad_(layer.layer_number > layer.config.num_layers // 2)


def all_but_experts(chunk: torch.nn.Module) -> None:
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_(".experts." not in name)


def _train_only(chunk: torch.nn.Module, *parts: str) -> None:
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_(any(part in name for part in parts))


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        pytest.param(Pipeline(), [adapters, last_layers, all_but_experts, routers], id="alone"),
        pytest.param(DEEP, [adapters, last_layers], id="interleaved"),
        # There something must be trained in front of the first layer, with or without offload.
        pytest.param(DEEP, [adapters_and_embedding], id="overlap"),
    ],
)
def test_of_a_model_in_part_frozen_only_these_are_trained(shape: Pipeline, changes: list[Any]) -> None:
    case = Case("mixed", NAMES_OF_FROZEN, settings={"expert_model_parallel_size": shape.expert})
    if changes == [adapters_and_embedding]:
        case = case._replace(dtype=torch.bfloat16, settings=OVERLAP, wrap=True)
    cases = [case._replace(change=change) for change in changes]
    num_frozen = run_ranks(_num_frozen, cases, [2, 3] if shape.size == 1 else [4, 2], pipeline=shape)
    assert all(any(of_ranks) for of_ranks in zip(*num_frozen, strict=True))


def _num_frozen(cases: list[Case], microbatches: list[int]) -> list[int]:
    """Check each case; return how many parameters of this rank got no gradient in it."""
    num_frozen = []
    for case in cases:
        expected = run_without(case, microbatches)
        num_frozen.append(list(expected[0].values()).count("none"))
        run_with(case, microbatches, expected, is_evaluated=True, has_report=case is cases[0])
    return num_frozen


# -- gradients that a linear layer adds to `main_grad` itself: it finds the same parameter object in backward ----------

FUSED = {"gradient_accumulation_fusion": True}
NAMES = ["qkv_linear", "core_attn", "attn_proj", "mlp_fc1", "mlp_act", "mlp_fc2"]


@pytest.mark.compat
@on_ranks()
def test_every_weight_says_that_its_gradient_was_added() -> None:
    with kernels() as kernel, apply(ALL, modules=NAMES) as handle:
        (chunk,) = make_chunks(make_config("dense", torch.bfloat16, **FUSED), wrap=True)
        run([chunk], 3)
        assert stats_of(handle).copied_out_bytes > 0
        linears = (layers.ColumnParallelLinear, layers.RowParallelLinear)
        weights = [module.weight for module in chunk.modules() if isinstance(module, linears)]
        assert kernel.call_count == 3 * len(weights) > 0
        assert all(weight.grad_added_to_main_grad and weight.main_grad.any() for weight in weights)


@on_ranks(world_size=2)
def test_gradients_reduced_during_the_backward() -> None:
    """Give every parameter a gradient, which data parallelism wants although it is not read."""

    def steps() -> list[dict[str, str]]:
        config = make_config("dense", torch.bfloat16, **FUSED)
        return train(config, make_chunks(config), lambda chunks: step(chunks, 2))

    with kernels():
        expected = steps()
        with apply(ALL, modules=NAMES):
            assert steps() == expected


@contextmanager
def kernels() -> Iterator[mock.Mock]:
    """In the place of apex's module; what it gives counts the calls."""
    kernel = mock.Mock(side_effect=_add)
    names: dict[str, Any] = {"fused_weight_gradient_mlp_cuda": SimpleNamespace(wgrad_gemm_accum_fp32=kernel)}
    # TransformerEngine would make the unread gradient on the GPU.
    with mock.patch.multiple(layers, create=True, **names, _grad_accum_fusion_available=True, HAVE_TE=False):
        yield kernel


def _add(inputs: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
    main_grad.add_(grad.float().t() @ inputs.float())
