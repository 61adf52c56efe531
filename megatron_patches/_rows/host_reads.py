# SPDX-License-Identifier: Apache-2.0
"""Provides a mode in which torch reads small device tensors without waiting for the copies of activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from offload_engine import OffloadEngine


class HostReads(TorchFunctionMode):
    """Reads device tensors by `Device.host_read` in `cpu()`, `item()`, `tolist()` and `masked_select()`.

    For single calls of code that cannot be changed: each operation under the mode costs about a microsecond more.

    Args:
        engine: performs the reads.
        num_selected: number of results of every `masked_select`; None: the host reads that number, too.
    """

    def __init__(self, engine: OffloadEngine, num_selected: int | None = None) -> None:
        super().__init__()
        self._engine = engine
        self._num_selected = num_selected

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not kwargs and any(isinstance(arg, torch.Tensor) and arg.is_cuda for arg in args):
            if func in _READS:
                return func(read_now(args[0], self._engine))
            if func in _SELECTS:
                return self._select(*args)
        return func(*args, **kwargs)

    def _select(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        count = self._num_selected
        if count is None:
            count = int(read_now(mask.sum(), self._engine))
        return select(values, mask, count)


_READS = (torch.Tensor.cpu, torch.Tensor.item, torch.Tensor.tolist)
_SELECTS = (torch.Tensor.masked_select, torch.masked_select)


def read_now(value: Any, engine: OffloadEngine) -> Any:
    """Return a device tensor on the host, after waiting for it; return any other value unchanged."""
    return engine.device.host_read(value).wait() if isinstance(value, torch.Tensor) and value.is_cuda else value


def select(values: torch.Tensor, mask: torch.Tensor, count: int) -> torch.Tensor:
    """Return `values.masked_select(mask)` of tensors of one shape, given the number of results."""
    selected: torch.Tensor = _Select.apply(values, mask, count)
    return selected


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, mask: torch.Tensor, count: int) -> torch.Tensor:
        flat = mask.reshape(-1)
        # The position of each True among the results; each False goes to one spare position after them.
        places = torch.where(flat, flat.cumsum(0) - 1, count)
        numbers = torch.arange(flat.numel(), device=flat.device)
        positions = numbers.new_empty(count + 1).scatter_(0, places, numbers)[:count]
        ctx.save_for_backward(positions)
        ctx.shape = values.shape
        return values.reshape(-1)[positions]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (positions,) = ctx.saved_tensors
        zeros = grads[0].new_zeros(ctx.shape.numel())
        return zeros.scatter_(0, positions, grads[0]).view(ctx.shape), None, None
