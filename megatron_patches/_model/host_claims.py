# SPDX-License-Identifier: Apache-2.0
"""`HostClaims`: host memory that megatron-core's optimizers will take, but have not taken yet.

An optimizer on the CPU (`optimizer_cpu_offload`) takes memory for its gradients and its state in its first step, which
comes after the first step of the engine. What it has taken by then is not free memory and needs no accounting.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

_STATES = 2
"""Tensors of the size of a parameter in the state of an optimizer: Adam's two moments."""


class HostClaims:
    """Adds up what optimizers will take. It keeps none of them alive."""

    def __init__(self) -> None:
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, optimizer: Any) -> None:
        """Add a `HybridDeviceOptimizer`, which was made just now."""
        self._optimizers.add(optimizer)

    def nbytes(self) -> int:
        """Return the bytes still to be taken. An optimizer that has all it needs is forgotten."""
        claims = {optimizer: sum(_claims(optimizer)) for optimizer in self._optimizers}
        self._optimizers.difference_update(optimizer for optimizer, claim in claims.items() if not claim)
        return sum(claims.values())


def _claims(optimizer: Any) -> Iterator[int]:
    for inner in optimizer.cpu_optimizers:
        for parameter in _parameters(inner):
            if parameter not in optimizer.cpu_copy_map_grad:
                yield parameter.nbytes
            if not inner.state.get(parameter):
                yield _STATES * parameter.nbytes


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
