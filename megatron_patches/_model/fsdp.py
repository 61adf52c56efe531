# SPDX-License-Identifier: Apache-2.0
"""The weights that Megatron-FSDP has in place of a model's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch


def gathered_weights(wrapped: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Yield the parameters that forwards and backwards of model chunks run with, whole or not yet gathered.

    Between two steps the modules of a chunk hold others: shards, for the optimizer.

    Args:
        wrapped: model chunks as the schedule gets them; those without Megatron-FSDP have none.
    """
    for module in wrapped:
        inner: object = module
        while isinstance(inner, torch.nn.Module):
            yield from _raw_parameters(inner)
            inner = getattr(inner, "module", None)


def _raw_parameters(module: torch.nn.Module) -> Iterable[torch.Tensor]:
    is_fsdp = hasattr(module, "param_and_grad_buffer") and isinstance(getattr(module, "raw_param", None), dict)
    return module.raw_param.values() if is_fsdp else ()  # type: ignore[operator]
