# SPDX-License-Identifier: Apache-2.0
"""Times the steps of a pipeline, whose ranks wait for each other, by how long each rank is at work in its actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from offload_engine.planning.simulate import run_in_order
from offload_engine.planning.slowed import factor_of
from offload_engine.schedule import Action

_NUM_HALVINGS: Final = 14
"""To find a ratio: the last ones change a step by less than a ten thousandth."""


class RankWork(NamedTuple):
    """What one rank does in a step."""

    actions: tuple[Action, ...]
    """In order; virtual stage `v` of rank `r` is stage `v * number of ranks + r`."""
    compute_ms: tuple[float, ...]
    """Time of compute in each action, with everything offloaded."""
    waited_ms: tuple[float, ...]
    """How long compute waits for copies in each action."""
    busy: float = 0.0
    """See `Prediction.busy`."""

    def milliseconds(self, busy_ratio: float) -> list[float]:
        """Return the time of each action, for a ratio as in `Costs`."""
        slower = factor_of(busy_ratio, self.busy)
        return [slower * ms + waited for ms, waited in zip(self.compute_ms, self.waited_ms, strict=True)]

    def towards(self, other: RankWork, share: float) -> RankWork:
        """Return the work that is this share of the way from here to `other`, which has the same actions."""
        compute, waited = (
            tuple(before + share * (after - before) for before, after in zip(*times, strict=True))
            for times in ((self.compute_ms, other.compute_ms), (self.waited_ms, other.waited_ms))
        )
        return RankWork(self.actions, compute, waited, self.busy + share * (other.busy - self.busy))


class Pipeline(NamedTuple):
    """What all ranks of a pipeline do in a step, in order of the ranks."""

    ranks: tuple[RankWork, ...]
    rest_ms: float = 0.0
    """What every step takes besides, such as the exchange between ranks and the optimizer."""

    def with_rank(self, rank: int, work: RankWork) -> Pipeline:
        """Return the pipeline with other work of one rank."""
        return self._replace(ranks=(*self.ranks[:rank], work, *self.ranks[rank + 1 :]))

    def step_ms(self, busy_ratio: float = 1.0) -> float:
        """Return how long a step takes, for a ratio as in `Costs`, which holds for all ranks.

        Raises:
            ValueError: if the ranks wait for each other for ever.
        """
        return self.rest_ms + _last_end(self.ranks, [rank.milliseconds(busy_ratio) for rank in self.ranks])

    def busy_ratio(self, measured_ms: float, least: float, most: float) -> float:
        """Return the ratio, of those between two, with which a step takes as long as measured, or nearly."""
        if least > most:
            return most
        for _ in range(_NUM_HALVINGS):
            middle = (least + most) / 2
            least, most = (middle, most) if self.step_ms(middle) < measured_ms else (least, middle)
        return (least + most) / 2


def _last_end(ranks: Sequence[RankWork], times: Sequence[Sequence[float]]) -> float:
    """Return when the last rank has run its actions, in ms from the begin of the first one."""
    clocks = [0.0] * len(ranks)

    def run(rank: int, position: int, received: float) -> float:
        clocks[rank] = max(clocks[rank], received) + times[rank][position]
        return clocks[rank]

    run_in_order([rank.actions for rank in ranks], run)
    return max(clocks)
