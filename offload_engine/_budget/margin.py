# SPDX-License-Identifier: Apache-2.0
"""Resolves a budget, and checks it; `Margin` computes how much "auto" leaves free, from the variation between steps."""

from __future__ import annotations

from typing import Final

from offload_engine._devices.base import MemoryGauge
from offload_engine.errors import BudgetError
from offload_engine.gpu_budget import below_held_text, resolve_budget
from offload_engine.sizes import Size, least_margin_bytes, parse_size

_TIMES: Final = 2
"""Factor by which the variation over many steps may exceed that over a few."""


class Margin:
    """Watches what is held outside torch's allocator, which no prediction covers.

    What the allocator reserves is predicted for each decision, whatever the steps before it have left there.

    Args:
        total_bytes: memory of the GPU.
    """

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._outside: list[int] = []

    def note(self, outside_bytes: int) -> None:
        """Note what is held outside when a step has finished."""
        self._outside.append(outside_bytes)

    def budget_bytes(self) -> int:
        """Return what the process may hold: the whole memory, less twice the variation, or a least margin."""
        settled = self._outside[1:] or self._outside  # in the first step libraries are loaded
        varied = max(settled, default=0) - min(settled, default=0)
        return self._total_bytes - max(least_margin_bytes(self._total_bytes), _TIMES * varied)


def budget_bytes(gpu_budget: int | str, gauge: MemoryGauge) -> int | None:
    """Return a budget in bytes; None if it is "auto", which is measured.

    Args:
        gpu_budget: bytes, a share of the GPU such as "90%", or "auto".
        gauge: of the device.

    Raises:
        ValueError: if it is above the memory of the GPU, or depends on it and there is none.
    """
    size = parse_size(gpu_budget) if isinstance(gpu_budget, str) else Size(gpu_budget)
    nbytes = resolve_budget("gpu_budget", size, gauge.total_bytes())
    return None if size == Size() else nbytes


def check_held(budget_bytes: int, gauge: MemoryGauge) -> None:
    """Check, before the first step, that the budget is above what the process holds by then.

    Not before, because a model may come to the GPU, or be divided among several, after its engine is made.

    Raises:
        BudgetError: if it is not.
    """
    held = gauge.taken_bytes() if gauge.total_bytes() else 0
    if held and budget_bytes <= held:
        raise BudgetError(below_held_text("gpu_budget", budget_bytes, held))
