# SPDX-License-Identifier: Apache-2.0
"""Training within a budget of bytes on this rank, for the tests with process groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megatron_patches import apply
from tests.dist.tiny import ALL, engine_of, run, stats_of, step


class Skewed:
    """A gauge of a device on which all else takes `extra` bytes more."""

    def __init__(self, gauge: Any, extra: int) -> None:
        self._gauge = gauge
        self.extra = extra

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._gauge, name)
        return (lambda: found() + self.extra) if name in ("peak_bytes", "held_bytes", "outside_bytes") else found


def optimizer_of(*models: Sequence[torch.nn.Module]) -> torch.optim.Optimizer:
    """Return one that changes nothing; a budget waits for its first step."""
    return torch.optim.SGD([p for chunks in models for chunk in chunks for p in chunk.parameters()], lr=0.0)


class Trained(NamedTuple):
    """The peak of each step, and what the engine has decided by."""

    peaks: list[int]
    view: Any


def train(
    make: Callable[[], list[Any]],
    microbatches: Sequence[int],
    expected: Mapping[int, dict[str, str]],
    step: Callable[[list[Any], int], dict[str, str]] = step,
) -> Trained:
    """Compare the steps of a model with those without offload at these numbers of microbatches; evaluate in between."""
    peaks: list[int] = []
    with apply(ALL, has_report=False) as handle:
        optimizer = optimizer_of(chunks := make())
        for number in microbatches:
            assert step(chunks, number) == expected[number], number
            optimizer.step()
            peaks.append(stats_of(handle).peak_resident_bytes)
            if len(peaks) % 3 == 1:
                run(chunks, number, forward_only=True)
        return Trained(peaks, engine_of(handle).budget)


def ends(view: Any) -> tuple[int, int]:
    """Return what is predicted with everything offloaded, and with nothing moved."""
    chosen = view.decider.chosen
    return chosen.floor.held_bytes, chosen.top.held_bytes


def gathered(value: Any) -> list[Any]:
    """Return the value of each rank."""
    found = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value)
    return found
