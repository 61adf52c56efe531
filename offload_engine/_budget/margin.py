# SPDX-License-Identifier: Apache-2.0
"""`Margin`: computes how much of a GPU a budget of "auto" leaves free, from the variation between steps."""

from __future__ import annotations

from typing import Final

from offload_engine._devices.base import MemoryGauge

_LEAST_BYTES: Final = 128 << 20
"""Communicators and libraries allocate later, too."""
_TIMES: Final = 2
"""Factor by which the variation over many steps may exceed that over a few."""


class Margin:
    """Watches what a process holds besides its peak of allocated bytes: outside the allocator, and reserved by it.

    Args:
        total_bytes: memory of the GPU.
    """

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._extras: list[int] = []

    def note(self, held_bytes: int, peak_bytes: int) -> None:
        """Note a finished step."""
        self._extras.append(held_bytes - peak_bytes)

    def budget_bytes(self) -> int:
        """Return what the process may hold: the whole memory, less twice the variation."""
        settled = self._extras[1:] or self._extras  # in the first step libraries are loaded
        varied = max(settled, default=0) - min(settled, default=0)
        return self._total_bytes - max(_LEAST_BYTES, _TIMES * varied)


def margin_of(gauge: MemoryGauge) -> Margin:
    """Return the margin of a GPU.

    Raises:
        ValueError: if there is none.
    """
    total = gauge.total_bytes()
    if not total:
        raise ValueError(
            "gpu_budget='auto' depends on the memory of a GPU, and there is none here: give a number of bytes, which "
            "then bounds saved tensors"
        )
    return Margin(total)
