# SPDX-License-Identifier: Apache-2.0
"""`FloorSteps`: learns from the steps that offload everything, besides the measured one."""

from __future__ import annotations

from typing import Final, NamedTuple

from offload_engine._budget.allowing import TOLERANCE
from offload_engine._budget.last_step import LastStep
from offload_engine._budget.margin import Margin
from offload_engine._budget.optimizers import OptimizerWatch

_TIMES: Final = 2
"""Factor by which the variation over many steps may exceed that over a few; beyond `TOLERANCE` groups leave."""

_ALIKE: Final = 33 / 32
"""Steps whose saved bytes are within this ratio of each other take equally long."""


class _Timed(NamedTuple):
    num_chunks: int
    chunk_bytes: float
    milliseconds: float

    def is_like(self, other: _Timed) -> bool:
        least, most = sorted((self.chunk_bytes, other.chunk_bytes))
        return self.num_chunks == other.num_chunks and most <= _ALIKE * least


class FloorSteps:
    """Watches the steps before a decision; the first ones, in which libraries are loaded, only for the margin.

    Args:
        margin: measures a budget of "auto"; None: the budget is given.

    Attributes:
        optimizers: tells when optimizers have their state.
        has_state: whether they have it, on every rank.
        varied_share: share by which the bytes that a chunk saves may differ from step to step, as the routing of tokens
            to experts changes.
    """

    def __init__(self, margin: Margin | None) -> None:
        self.optimizers: OptimizerWatch = OptimizerWatch()
        self.has_state: bool = False
        self.varied_share: float = 0.0
        self._saved_bytes: list[float] = []
        self._timed: list[_Timed] = []
        self._margin = margin

    @property
    def milliseconds(self) -> float:
        """Return how long a step like the last one takes: the least of all, as each may have been delayed."""
        return min(each.milliseconds for each in self._timed if each.is_like(self._timed[-1]))

    def note(self, last: LastStep) -> None:
        """Note what a finished step held and saved."""
        if self.has_state and last.has_ended and last.chunk_bytes:
            self._saved_bytes.append(last.chunk_bytes)
            varied = max(self._saved_bytes) / min(self._saved_bytes) - 1.0
            self.varied_share = min(max(self.varied_share, _TIMES * varied), TOLERANCE - 1.0)
        if self._margin is not None:
            self._margin.note(last.gauge.outside_bytes())

    def note_time(self, last: LastStep) -> None:
        """Note how long a step took, when the next one begins."""
        self._timed.append(_Timed(last.num_chunks, last.chunk_bytes, last.milliseconds))

    def begin_state(self) -> None:
        """Note that optimizers have their state."""
        self.has_state = True
        self.optimizers.close()

    def forget(self) -> None:
        """Forget what steps took, because later ones save other bytes."""
        self._timed.clear()
        self._saved_bytes.clear()
