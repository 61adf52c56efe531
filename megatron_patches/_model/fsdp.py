# SPDX-License-Identifier: Apache-2.0
"""Finds the weights that Megatron-FSDP uses in place of a model's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch


def gathered_weights(wrapped: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Yield the parameters with which model chunks run forward and backward, gathered or not.

    Between two steps the modules of a chunk hold other parameters: shards, for the optimizer.

    Args:
        wrapped: model chunks as the schedule gets them; nothing is yielded for those without Megatron-FSDP.
    """
    for module in wrapped:
        inner: object = module
        while isinstance(inner, torch.nn.Module):
            yield from _raw_parameters(inner)
            inner = getattr(inner, "module", None)


def _raw_parameters(module: torch.nn.Module) -> Iterable[torch.Tensor]:
    is_fsdp = hasattr(module, "param_and_grad_buffer") and isinstance(getattr(module, "raw_param", None), dict)
    return module.raw_param.values() if is_fsdp else ()  # type: ignore[operator]
