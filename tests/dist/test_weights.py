# SPDX-License-Identifier: Apache-2.0
"""The weights of a model: looked up in time, and their gradients added by a kernel."""

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
from tests.dist.launch import on_ranks
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
