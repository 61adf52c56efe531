# SPDX-License-Identifier: Apache-2.0
"""`HostClaims`: counts host memory that megatron-core's optimizers have yet to take.

An optimizer on the CPU (`optimizer_cpu_offload`) takes memory for its gradients and its state in its first step, after
the first forward and backward with the engine. Memory that it has taken is not free, so it is not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

_STATES = 2
"""Tensors per parameter in the state of an optimizer: Adam's two moments."""


class HostClaims:
    """Adds up what optimizers will take, without keeping them alive."""

    def __init__(self) -> None:
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, optimizer: Any) -> None:
        """Add a new `HybridDeviceOptimizer`."""
        self._optimizers.add(optimizer)

    def nbytes(self) -> int:
        """Return the bytes still to be taken; forget optimizers that have all they need."""
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
