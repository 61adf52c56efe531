# SPDX-License-Identifier: Apache-2.0
"""Weight gradients that a linear layer adds to `main_grad` itself: it finds the same parameter object in backward.

The kernel is apex's, which needs a GPU; here a function of the tests is in its place, all else is megatron-core's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core.tensor_parallel import layers

from megatron_patches import Handle, apply
from tests.dist.launch import on_ranks
from tests.dist.parity import EXPERTS, Case, run_with, run_without
from tests.dist.settings import DEEP, ON_TWO_RANKS
from tests.dist.tiny import ALL, make_chunks, make_config, run, stats_of, step
from tests.dist.training import train

FUSED = {"gradient_accumulation_fusion": True}
NAMES = ["qkv_linear", "core_attn", "attn_proj", "mlp_fc1", "mlp_act", "mlp_fc2", *EXPERTS]


@on_ranks(DEEP)
def test_parity() -> None:
    for names in (NAMES, ["self_attn", "experts"]):
        case = Case("mixed", names, torch.bfloat16, {**FUSED, **ON_TWO_RANKS}, wrap=True)
        with kernels() as kernel:
            run_with(case, [4], run_without(case, [4]), is_evaluated=True)
            assert kernel.call_count > 0


@on_ranks()
def test_every_weight_says_that_its_gradient_was_added() -> None:
    with kernels() as kernel, _applied() as handle:
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
    with kernels():
        expected = _train()
        with _applied():
            assert _train() == expected


def _train() -> list[dict[str, str]]:
    config = make_config("dense", torch.bfloat16, **FUSED)
    return train(config, make_chunks(config), lambda chunks: step(chunks, 2))


def _applied() -> Handle:
    return apply(ALL, modules=NAMES[:6])


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
