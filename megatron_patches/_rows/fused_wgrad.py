# SPDX-License-Identifier: Apache-2.0
"""Rows for fused weight gradients: give the backward of megatron-core's linear layer the Parameter object itself.

The backward adds the gradient to `main_grad` of the saved weight and sets a flag on that weight. But under saved
tensors hooks autograd returns another tensor object for a leaf, without the attributes of the parameter. The layer then
returns no gradient, and data parallelism that reduces during the backward stops the run.
(TransformerEngine's layers keep a reference to the parameter themselves.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_patches._rows.registry import Patch
from megatron_patches._rows.runtime import Runtime

_LINEAR = "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication"
_WHY = "saved tensors hooks return another tensor than the parameter itself, which has `main_grad`"


def fused_wgrad_rows(runtime: Runtime) -> list[Patch]:
    """Return the rows; outside a step with offload each passes its call through unchanged."""
    return [
        Patch(target=f"{_LINEAR}.forward", wrapper=functools.partial(_wrap_forward, runtime=runtime), why=_WHY),
        Patch(target=f"{_LINEAR}.backward", wrapper=_wrap_backward, why=_WHY),
    ]


class _ContextWithWeight:
    """Stands in for an autograd context whose saved weight is the Parameter itself."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    @property
    def saved_tensors(self) -> tuple[torch.Tensor, torch.nn.Parameter]:
        inputs, _ = self._ctx.saved_tensors
        return inputs, self._ctx.noted_weight


def _wrap_forward(original: Callable[..., Any], *, runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(ctx: Any, inputs: Any, weight: Any, bias: Any, is_fused: bool, *args: Any) -> Any:
        ctx.noted_weight = weight if is_fused and runtime.running_engine is not None else None
        return original(ctx, inputs, weight, bias, is_fused, *args)

    return forward


def _wrap_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(ctx: Any, *grads: Any) -> Any:
        has_weight = getattr(ctx, "noted_weight", None) is not None
        return original(_ContextWithWeight(ctx) if has_weight else ctx, *grads)

    return backward
