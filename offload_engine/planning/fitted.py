# SPDX-License-Identifier: Apache-2.0
"""Fits simulated times to a measured step in which everything was offloaded."""

from __future__ import annotations

from typing import NamedTuple

from offload_engine.planning.steps import Outcome


class Fit(NamedTuple):
    """Fits the simulated times of steps to a measured one."""

    stall_share: float
    """Share of the simulated waits for copies that is real."""
    scale: float = 1.0
    """How much longer a step takes than its compute and its real waits."""
    rest_ms: float = 0.0
    """What every step takes besides."""

    def work_ms(self, outcome: Outcome) -> float:
        """Return how long this rank computes and waits for copies."""
        return outcome.milliseconds - (1.0 - self.stall_share) * outcome.stalled_ms

    def step_ms(self, outcome: Outcome) -> float:
        """Return how long a step takes."""
        return self.scale * self.work_ms(outcome) + self.rest_ms


def fit(floor: Outcome, floor_ms: float, waited_ms: float | None = None) -> Fit:
    """Fit simulated times to a measurement with everything offloaded.

    A simulation knows least about when copies complete, so waits for copies are fitted first. (16 layers on one H200,
    everything offloaded: 358 ms of simulated waits, 245 of measured ones.) They never exceed the simulated ones: the
    remaining difference is the same for every decision. In a pipeline much of it are waits for other ranks, which are
    no waits for copies, and shrink with the step.

    Args:
        floor: simulated step, with everything offloaded.
        floor_ms: its measured time.
        waited_ms: measured waits for copies in it, on a rank of a pipeline.
    """
    over_ms = floor_ms - floor.busy_ms if waited_ms is None else waited_ms
    found = Fit(min(1.0, max(0.0, over_ms / floor.stalled_ms)) if floor.stalled_ms else 1.0)
    work_ms = found.work_ms(floor)
    if waited_ms is None or not work_ms:
        return found._replace(rest_ms=floor_ms - work_ms)
    return found._replace(scale=floor_ms / work_ms)
