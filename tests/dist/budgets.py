# SPDX-License-Identifier: Apache-2.0
"""Training within a budget of bytes on this rank, for the tests with process groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron_patches import Handle
from tests.dist.tiny import engine_of, run, stats_of, step


class Skewed:
    """A gauge of a device on which all else takes `extra` bytes more."""

    def __init__(self, gauge: Any, extra: int) -> None:
        self._gauge = gauge
        self.extra = extra

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gauge, name)

    def peak_bytes(self) -> int:
        return self._gauge.peak_bytes() + self.extra

    def held_bytes(self) -> int:
        return self._gauge.held_bytes() + self.extra

    def outside_bytes(self) -> int:
        return self._gauge.outside_bytes() + self.extra


def optimizer_of(*models: Sequence[torch.nn.Module]) -> torch.optim.Optimizer:
    """Return one that changes nothing; a budget waits for its first step."""
    return torch.optim.SGD([p for chunks in models for chunk in chunks for p in chunk.parameters()], lr=0.0)


def budget_of(handle: Handle) -> Any:
    """Return what the engine decides by."""
    return engine_of(handle).budget


def train(
    handle: Handle,
    chunks: list[Any],
    microbatches: Sequence[int],
    expected: Mapping[int, dict[str, str]],
    step: Callable[[list[Any], int], dict[str, str]] = step,
) -> list[int]:
    """Compare steps with those expected at their numbers of microbatches, evaluate in between; return their peaks."""
    optimizer, peaks = optimizer_of(chunks), []
    for number in microbatches:
        assert step(chunks, number) == expected[number], number
        optimizer.step()
        peaks.append(stats_of(handle).peak_resident_bytes)
        if len(peaks) % 3 == 1:
            run(chunks, number, forward_only=True)
    return peaks


def largest(*numbers: int) -> list[int]:
    """Return the largest of all ranks."""
    tensor = torch.tensor(numbers)
    torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
    return tensor.tolist()


def ends(handle: Handle) -> tuple[int, int]:
    """Return what is predicted with everything offloaded, and with nothing moved."""
    chosen = budget_of(handle).decider.chosen
    return chosen.floor.held_bytes, chosen.top.held_bytes
