# SPDX-License-Identifier: Apache-2.0
"""`Margin`: computes how much of a GPU a budget of "auto" leaves free, from the variation between steps."""

from __future__ import annotations

from typing import Final

from offload_engine._devices.base import MemoryGauge
from offload_engine.sizes import LEAST_MARGIN_BYTES, Size, parse_size

_TIMES: Final = 2
"""Factor by which the variation over many steps may exceed that over a few."""
_NO_GPU: Final = (
    "gpu_budget={!r} depends on the memory of a GPU, and there is none here: give a number of bytes, which then bounds "
    "saved tensors"
)


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
        return self._total_bytes - max(LEAST_MARGIN_BYTES, _TIMES * varied)


def budget_bytes(gpu_budget: int | str, gauge: MemoryGauge) -> int | None:
    """Return a budget in bytes; None if it is "auto", which is measured.

    Args:
        gpu_budget: bytes, a share of the GPU such as "90%", or "auto".
        gauge: of the device.

    Raises:
        ValueError: if it is a share and there is no GPU, or above the memory of the GPU.
    """
    total = gauge.total_bytes()
    size = parse_size(gpu_budget) if isinstance(gpu_budget, str) else Size(gpu_budget)
    if size == Size():
        return None
    if size.percent is not None and not total:
        raise ValueError(_NO_GPU.format(gpu_budget))
    nbytes = size.resolve(total)
    if total and nbytes > total:
        raise ValueError(f"gpu_budget is {nbytes:,} bytes, more than the {total:,} of the GPU: lower it, or set 'auto'")
    return nbytes


def margin_of(gauge: MemoryGauge) -> Margin:
    """Return the margin of a GPU.

    Raises:
        ValueError: if there is none.
    """
    total = gauge.total_bytes()
    if not total:
        raise ValueError(_NO_GPU.format("auto"))
    return Margin(total)
