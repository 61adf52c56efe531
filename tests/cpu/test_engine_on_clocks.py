# SPDX-License-Identifier: Apache-2.0
"""The engine on the simulator's clocks does what the simulator says."""

from __future__ import annotations

import pytest

from offload_engine.planning.simulate import PipelineJob
from tests.dense_jobs import ALL, ATTENTION, DEEP, MOST, ONE_RANK, dense_job, simulate_planned, with_bounds
from tests.engine_on_clocks import ClockDevice, run_engine

EQUAL = [
    dense_job(ATTENTION),
    dense_job(ALL, virtual=4),
    dense_job(MOST, max_inflight_bytes=1300),
    dense_job(MOST, horizon_bytes=2000),
    dense_job(ALL, max_inflight_bytes=2000, horizon_bytes=1300),
    DEEP,
    ONE_RANK,
    dense_job(("core_attn",), pipeline=4, virtual=2, layers=16),
    dense_job(("mlp_act",), virtual=1),
    # Budgets for which the reactive policy happens to guess what the plan knows.
    dense_job(ALL, resident_bytes=2000),
    with_bounds(ONE_RANK, resident_bytes=3072),
]


@pytest.mark.parametrize("job", EQUAL)
def test_engine_runs_the_step_that_the_simulator_predicts(job: PipelineJob) -> None:
    """Equal to the byte, and to a nanosecond."""
    engine, planned = run_engine(job), simulate_planned(job)
    counters = [rank.counters for rank in planned.ranks]
    assert planned.milliseconds == pytest.approx(engine.milliseconds, abs=1e-6)
    assert [rank.stalled_ms for rank in planned.ranks] == pytest.approx(engine.stalled, abs=1e-6)
    for name in ("peak_host_bytes", "peak_resident_bytes", "copied_out_bytes", "copied_in_bytes"):
        assert [getattr(c, name) >> 20 for c in counters] == [getattr(stats, name) >> 10 for stats in engine.stats]
    assert sum(c.num_misses for c in counters) == sum(stats.prefetch_misses for stats in engine.stats) == 0


@pytest.mark.parametrize("job", [ONE_RANK, dense_job(ALL), dense_job(MOST, max_inflight_bytes=1300)])
def test_a_step_that_asks_no_event_takes_as_long(job: PipelineJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a capture: copy-outs found complete at no boundary are waited for where the bound on copies demands it."""
    asking = run_engine(job)
    monkeypatch.setattr(ClockDevice, "is_complete", lambda self, event: False)
    captured = run_engine(job)
    assert captured.milliseconds == pytest.approx(asking.milliseconds, abs=1e-6)
    for name in ("peak_resident_bytes", "peak_host_bytes"):
        assert [getattr(s, name) for s in captured.stats] == [getattr(s, name) for s in asking.stats]
