# SPDX-License-Identifier: Apache-2.0
"""The whole budget on the simulator's clocks: it measures times and the link there, and predicts what follows."""

from __future__ import annotations

import pytest

from offload_engine import OffloadConfig, OffloadEngine
from offload_engine._budget.state import State
from offload_engine.planning.simulate import RankJob
from tests.dense_jobs import MIB, ONE_RANK
from tests.engine_on_clocks import SCALE, EngineRank, _run_rank

LEAST, MOST = 1985 * MIB // SCALE, 9480 * MIB // SCALE
"""Of the resident bytes of `ONE_RANK`, in bytes of the engine."""


class BudgetRank(EngineRank):
    """A rank with a budget; its clocks run on from step to step, and the host begins each with the device."""

    def __init__(self, job: RankJob, budget: int) -> None:
        super().__init__(job, ONE_RANK.link)
        self.engine.close()
        self.engine = OffloadEngine(OffloadConfig(min_tensor_bytes=1, gpu_budget=budget), self.device)  # type: ignore[arg-type]
        self.engine.pool._slab_bytes //= SCALE
        controller = self.engine.budget
        assert controller is not None
        self.controller = controller
        self.controller._optimizers._has_stepped = True

    def begin_step(self) -> None:
        clocks = self.device.clocks
        clocks.host = clocks.compute = max(clocks.host, clocks.compute, *self.device._copied.values())
        self.engine.pool.take_all_back()
        self.engine.begin_iteration(self.job.actions)

    def step(self) -> float:
        """Run a step; return its milliseconds."""
        running = _run_rank(self, 0, 1, 0, {})
        for _ in running:
            raise AssertionError("it waits for itself")
        self.engine.end_iteration()
        return self.device.clocks.compute


@pytest.mark.parametrize("share", [0.01, 0.2, 0.4, 0.6, 0.8, 1.01])
def test_time_and_memory_are_as_predicted(share: float) -> None:
    [job] = ONE_RANK.ranks
    rank = BudgetRank(job, round(LEAST + share * (MOST - LEAST)))
    while rank.controller.state is not State.HOLD:
        rank.step()
        assert rank.controller._num_steps < 9
    rank.step()
    summary = rank.controller.summary
    assert summary is not None
    assert summary.measured_step_ms == pytest.approx(summary.predicted_step_ms, rel=0.01)
    assert rank.engine.stats.peak_resident_bytes <= summary.predicted_peak_bytes <= summary.budget_bytes
    assert summary.predicted_step_ms <= summary.lowest_step_ms
    link = rank.controller.decider._costs.link
    assert (link.out_gbps * SCALE, link.in_gbps * SCALE) == pytest.approx((50.0, 48.0), rel=0.01)
    rank.engine.close()


def test_times_of_groups_are_those_of_the_job() -> None:
    [job] = ONE_RANK.ranks
    rank = BudgetRank(job, 1 << 40)
    while rank.controller.decider.chosen is None:
        rank.step()
    measured = rank.controller.decider._job
    assert measured is not None
    [expected], [found] = job.shapes, measured.shapes
    for group, known in zip(found.groups, expected.groups, strict=True):
        assert group.forward_ms == pytest.approx(known.lead_ms + known.forward_ms)
        assert group.nbytes == known.nbytes // SCALE
    assert found.head_ms == pytest.approx(expected.head_ms)
    assert found.head_backward_ms == pytest.approx(expected.head_backward_ms)
    backward = sum(g.backward_ms + g.lead_backward_ms for g in found.groups) + found.rest_backward_ms
    known_backward = sum(g.backward_ms + g.lead_backward_ms for g in expected.groups) + expected.rest_backward_ms
    assert backward == pytest.approx(known_backward)
    rank.engine.close()
