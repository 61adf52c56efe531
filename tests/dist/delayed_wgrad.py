# SPDX-License-Identifier: Apache-2.0
"""Linear layers that compute the gradient of their weight when `backward_dw` is called, as TransformerEngine's do.

megatron-core's own linear layers have `backward_dw`, but it does nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_layer import TransformerLayer

Pending = list[tuple[torch.Tensor, torch.Tensor]]


def delay_weight_gradients(chunk: torch.nn.Module) -> None:
    """Make every linear layer of the transformer layers such a one; for tensor-parallel size 1, without biases."""
    for layer in chunk.modules():
        if isinstance(layer, TransformerLayer):
            for module in layer.modules():
                if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                    assert module.bias is None, "biases are not delayed"
                    _delay(module)


def _delay(module: Any) -> None:
    pending: Pending = []

    def forward(inputs: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return _Linear.apply(inputs, module.weight, pending), None

    @torch.no_grad()
    def backward_dw() -> None:
        for inputs, grad in pending:
            flat = inputs.reshape(-1, inputs.shape[-1])
            module.weight.main_grad.add_(grad.reshape(-1, grad.shape[-1]).t().matmul(flat))
        pending.clear()

    module.forward = forward
    module.backward_dw = backward_dw


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, pending: Pending) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.pending = pending
        return inputs.matmul(weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        inputs, weight = ctx.saved_tensors
        ctx.pending.append((inputs, grads[0]))  # read after this node, and its saved tensors, are gone
        return grads[0].matmul(weight), None, None
