# SPDX-License-Identifier: Apache-2.0
"""Explains why a step ran out of memory under a budget: what was expected, and which part has grown."""

from __future__ import annotations

from typing import Final, NamedTuple

from offload_engine.sizes import short_size

_GROUPS: Final = "groups of saved tensors"
_ELSE: Final = "all else that is allocated"
_OVERHEAD: Final = "what is reserved in vain or outside torch"
_WHY: Final = {
    _GROUPS: "longer sequences, larger microbatches, or more tokens for some experts. Lower the budget, so that less "
    "is kept from the beginning",
    _ELSE: "weights, gradients, optimizer state, or tensors of modules that are not offloaded. Lower the budget, "
    "offload or recompute more modules, or shard the model further",
    _OVERHEAD: "fragments, communicators, or another process on this GPU. Lower the budget, or set "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
}


class MemoryParts(NamedTuple):
    """The most bytes that a process holds, by parts."""

    groups: int
    other: int
    overhead: int

    @property
    def total(self) -> int:
        """Return the sum."""
        return self.groups + self.other + self.overhead


def shortage_text(budget_bytes: int, expected: MemoryParts | None, found: MemoryParts) -> str:
    """Return a text that says what was expected, what was in use, and what has grown.

    Args:
        budget_bytes: what the process may hold.
        expected: by the plan; None: there was none yet.
        found: the peaks when memory ran out.
    """
    begin = f"gpu_budget is {short_size(budget_bytes)}"
    there = f"When memory ran out there were {_listed(found)}"
    if expected is None:
        return (
            f"{begin}, and nothing was planned yet: everything was being offloaded. {there}. Offload or recompute more "
            "modules, use smaller microbatches or shorter sequences, or shard the model further"
        )
    plan = f"{begin}, and the plan expected {short_size(expected.total)} at the most: {_listed(expected)}"
    grown = {name: have - had for name, have, had in zip(_WHY, found, expected, strict=True)}
    most = max(grown, key=lambda name: grown[name])
    if grown[most] <= 0:
        return f"{plan}. {there}: none has grown, so the budget is more than this GPU has free. Lower it"
    return (
        f"{plan}. {there}. {most[0].upper()}{most[1:]} has grown the most, by {short_size(grown[most])}: {_WHY[most]}"
    )


def _listed(parts: MemoryParts) -> str:
    return ", ".join(f"{short_size(nbytes)} of {name}" for name, nbytes in zip(_WHY, parts, strict=True))
