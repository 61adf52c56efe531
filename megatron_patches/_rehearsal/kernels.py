# SPDX-License-Identifier: Apache-2.0
"""Imitates what TransformerEngine's kernels save, allocate and touch, by autograd functions that compute nothing.

They are for hollow tensors: a kernel is replaced by torch operators that touch as many bytes, or take as many
operations. `megatron_patches._rehearsal.modules` uses them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Norm(torch.autograd.Function):
    """LayerNorm or RMSNorm: saves its input, its weight, and one or two floats per token."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight, *_statistics(x, 1 if bias is None else 2))
        ctx.has_bias = bias is not None
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, *_ = ctx.saved_tensors
        return grad + x, torch.empty_like(weight), torch.empty_like(weight) if ctx.has_bias else None


class Rotation(torch.autograd.Function):
    """Rotary position embedding in one kernel: saves the angles."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(freqs)
        return t * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 1, None


class Linear(torch.autograd.Function):
    """A linear layer, with or without a norm before it; with sequence parallelism it gathers or scatters tokens.

    It saves its input, and with a norm also the input of the norm. Gathered tokens are gathered again in backward.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor | None, how: Any) -> torch.Tensor:
        inner = x if norm is None else x * norm
        ctx.how = how
        ctx.save_for_backward(x, weight, norm, *(() if norm is None else (inner, *_statistics(x, how.num_statistics))))
        out = how.gathered(inner) @ weight.t()
        return how.reduced(out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, norm, *behind = ctx.saved_tensors
        inner = behind[0] if norm is not None else x
        grad = ctx.how.gathered_backward(grad)
        passed = ctx.how.reduced_backward(grad @ weight) if ctx.needs_input_grad[0] or norm is not None else None
        by_weight = _by_weight(grad, ctx.how.gathered(inner), weight)
        if norm is None:
            return passed, by_weight, None, None
        assert passed is not None
        return passed + x, by_weight, torch.empty_like(norm), None


class GroupedLinear(torch.autograd.Function):
    """The linear layers of all experts of a rank: as many operations as one of them on all tokens."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *weights)
        return x @ weights[0].t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        passed = grad @ weights[0]
        first = _by_weight(grad, x, weights[0])
        return passed, first, *(torch.empty_like(weight) for weight in weights[1:])


class Attention(torch.autograd.Function):
    """Fused attention over [sequence, batch, heads, dim]: saves its inputs, its output, and one float per row."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> torch.Tensor:
        out, rows = _flash(query, key, value, is_causal)
        ctx.is_causal = is_causal
        ctx.save_for_backward(query, key, value, out, rows)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, out, rows = ctx.saved_tensors
        in_fp32 = torch.empty_like(query, dtype=torch.float32)  # the gradient of the query is summed in it
        flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
        q, k, v, o, g = (t.permute(1, 2, 0, 3) for t in (query, key, value, out, grad))
        seq, seq_kv, seed = query.shape[0], key.shape[0], torch.empty(2, dtype=torch.int64)
        grads = flash_backward(g, q, k, v, o, rows, None, None, seq, seq_kv, 0.0, ctx.is_causal, seed, seed)
        del in_fp32
        return *(each.permute(2, 0, 1, 3) for each in grads), None


class Tokens:
    """Exchanges tokens of a linear layer with the other ranks of its tensor parallelism.

    Args:
        group: process group of tensor parallelism; None: nothing is exchanged.
        mode: "column", "row" or "duplicated".
        is_sequence_parallel: tokens are split among ranks outside the layer.
        num_statistics: number of floats that its norm saves per token.
    """

    def __init__(self, group: Any, mode: str, is_sequence_parallel: bool, num_statistics: int = 1) -> None:
        self.num_statistics = num_statistics
        self._group = group if group is not None and group.size() > 1 else None
        self._is_column = mode == "column"
        self._is_row = mode == "row"
        self._is_split = is_sequence_parallel

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input of the product."""
        return self._gather(x) if self._is_column and self._is_split else x

    def reduced(self, out: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer."""
        return self._reduce(out) if self._is_row else out

    def gathered_backward(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the product's output."""
        return self._gather(grad) if self._is_row and self._is_split else grad

    def reduced_backward(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the input."""
        return self._reduce(grad) if self._is_column else grad

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        if self._group is None:
            return x
        out = x.new_empty((x.shape[0] * self._group.size(), *x.shape[1:]))
        dist.all_gather_into_tensor(out, x, group=self._group)
        return out

    def _reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self._group is None:
            return x
        if not self._is_split:
            dist.all_reduce(x, group=self._group)
            return x
        out = x.new_empty((x.shape[0] // self._group.size(), *x.shape[1:]))
        dist.reduce_scatter_tensor(out, x, group=self._group)
        return out


def _statistics(x: torch.Tensor, number: int) -> list[torch.Tensor]:
    return [torch.empty(x.shape[:-1], dtype=torch.float32) for _ in range(number)]


def _by_weight(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a weight; with Megatron's fusion it is added to the kept gradient."""
    product = grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
    return product.to(weight.dtype)


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
    out, rows, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)
    return out.permute(2, 0, 1, 3), rows
