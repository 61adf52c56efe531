# SPDX-License-Identifier: Apache-2.0
"""The simulator against the figures of GPUs, and each of its rules alone."""

from __future__ import annotations

import pytest

from offload_engine.planning.clocks import Clocks, Link
from offload_engine.planning.host_bytes import HostBytes
from offload_engine.planning.plan import Plan, parse_plan
from offload_engine.planning.shapes import Bounds, ChunkShape, GroupShape
from offload_engine.planning.simulate import PipelineJob, RankJob, RankOutcome, simulate
from offload_engine.schedule import no_pipelining, parse_actions
from tests.dense_jobs import ALL, ATTENTION, MOST, dense_job, over_no_offload, simulate_planned


@pytest.mark.parametrize(("names", "on_host"), [(ATTENTION, [3465, 1925]), (MOST, [7018, 4070]), (ALL, [11050, 6310])])
def test_peak_on_host_is_that_of_gpus(names: tuple[str, ...], on_host: list[int]) -> None:
    """MiB on each of two H200, exactly."""
    ranks = simulate_planned(dense_job(names)).ranks
    assert [rank.counters.peak_host_bytes >> 20 for rank in ranks] == on_host


@pytest.mark.parametrize(
    ("job", "gpus", "simulated"),
    [
        (dense_job(ATTENTION), 1.0045, 1.0076),
        (dense_job(MOST), 1.0909, 1.0920),
        (dense_job(ALL), 1.3806, 1.3838),
        (dense_job(MOST, max_inflight_bytes=1300), 1.0290, 1.0262),
        (dense_job(ALL, max_inflight_bytes=1300), 1.2306, 1.2879),
        (dense_job(MOST, resident_bytes=2000), 1.0155, 1.0105),
    ],
)
def test_step_time_is_near_that_of_gpus(job: PipelineJob, gpus: float, simulated: float) -> None:
    """Step time over no offload; the GPUs were two H200."""
    assert over_no_offload(job) == pytest.approx(simulated, abs=1e-4)
    assert simulated == pytest.approx(gpus, abs=0.06 if gpus > 1.2 else 0.006)


# One rank, one chunk, three groups of 100 MB that take 1 ms each and, at 100 GB/s, as long to copy.
MB = 1_000_000
GROUPS = tuple(GroupShape("block", layer, 100 * MB, 1.0, 2.0) for layer in range(3))
LINK = Link(100.0, 100.0, 0.0)


def run_one(text: str, shape: ChunkShape | None = None, bounds: Bounds | None = None, link: Link = LINK) -> RankOutcome:
    job = RankJob(tuple(no_pipelining(1)), (shape or ChunkShape(GROUPS),), bounds or Bounds())
    return simulate(PipelineJob((job,), link), [parse_plan(text)]).ranks[0]


def test_a_copy_in_that_is_not_ahead_stalls_for_its_whole_time_and_is_a_miss() -> None:
    late = run_one("F0.0:0 OUT 0.0:0\nF0.0:2 DROP 0.0:0\nB0.0:0 IN 0.0:0")
    assert late.stalls == {"BACKWARD block": pytest.approx(1.0)}
    assert late.counters.num_misses == 1
    ahead = run_one("F0.0:0 OUT 0.0:0\nF0.0:2 DROP 0.0:0\nB0.0:1 IN 0.0:0")
    assert (ahead.stalled_ms, ahead.counters.num_misses) == (0.0, 0)
    assert ahead.counters.copied_in_bytes == 100 * MB


def test_host_bytes_that_a_copy_in_still_reads_are_lent_last() -> None:
    clocks = Clocks(LINK)
    host = HostBytes()
    host.begin_step(clocks)
    first, second = host.lend(64 << 20), host.lend(64 << 20)
    host.return_bytes(first, 5.0, is_unawaited=True)
    host.return_bytes(second, 7.0, is_unawaited=False)
    assert host.lend(64 << 20).free_at == 7.0
    host.note_awaited(first)
    assert host.lend(64 << 20).free_at == 5.0
    assert (host.lent_bytes, host.peak_lent_bytes) == (128 << 20, 128 << 20)


def test_jobs_that_cannot_run() -> None:
    rank = RankJob(tuple(no_pipelining(1)), (ChunkShape(GROUPS),))
    with pytest.raises(ValueError, match="2 plans for 1 ranks"):
        simulate(PipelineJob((rank,)), [Plan(()), Plan(())])
    turned = RankJob(tuple(parse_actions("F0.1 B0.1 F0.0 B0.0")), (ChunkShape(GROUPS),))
    straight = RankJob(tuple(parse_actions("F0.0 B0.0 F0.1 B0.1")), (ChunkShape(GROUPS),))
    with pytest.raises(ValueError, match="the ranks wait for each other"):
        simulate(PipelineJob((turned, straight)), [Plan(()), Plan(())])
    with pytest.raises(ValueError, match="bandwidths must be positive"):
        Link(out_gbps=0.0)
