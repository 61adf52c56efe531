"""How long compute waits for copies in pipelines, in virtual time."""

from __future__ import annotations

import pytest

from tests.virtual_time import LAYER, Job, run

ATTENTION = ("qkv_linear", "core_attn")
MOST = (*ATTENTION, "attn_proj", "mlp_fc1", "mlp_fc2")
ALL = tuple(module.name for module in LAYER)
DEEP = Job(MOST, pipeline=4, virtual=1, num_microbatches=16, layers=16)


def over_dry_run(job: Job, **config: int) -> float:
    return run(job, **config).milliseconds / run(job, dry_run=True).milliseconds


def test_what_moves_is_what_a_gpu_has_shown() -> None:
    """MiB on host at most, on two H200; and little more is pinned."""
    for names, expected in {ATTENTION: [3465, 1925], MOST: [7018, 4070], ALL: [11050, 6310]}.items():
        each = run(Job(names)).stats
        assert [stats.peak_host_bytes >> 10 for stats in each] == expected
        assert all(stats.host_bytes <= 1.1 * stats.peak_host_bytes for stats in each)


def test_copies_out_do_not_wait_for_copies_in() -> None:
    """Whose host bytes come back as soon as they are issued, while older ones are free."""
    outcome = run(Job(ATTENTION))
    assert outcome.stalled[0] == pytest.approx(0.0, abs=1e-6)
    assert outcome.milliseconds < 1.01 * run(Job(ATTENTION), dry_run=True).milliseconds


def test_a_backward_does_not_wait_for_copies_that_were_just_issued() -> None:
    """They have its time to end in."""
    assert over_dry_run(Job(ALL)) < 1.4
    assert over_dry_run(Job(ALL, virtual=4)) < 1.3


def test_a_limit_in_flight_is_all_that_the_backward_of_another_chunk_waits_for() -> None:
    assert run(Job(ATTENTION), max_inflight_bytes=1300).stalled == pytest.approx([0.0, 0.0], abs=1e-6)
    assert over_dry_run(Job(MOST), max_inflight_bytes=1300) < 1.03
    assert over_dry_run(Job(ALL), max_inflight_bytes=2000, horizon_bytes=1300) < 1.2


def test_a_budget_costs_less_than_the_lowest_peak() -> None:
    """Copies in leave room to forwards, and what would stay for a backward that is not next does not take it."""
    assert over_dry_run(Job(MOST), resident_bytes=2000) < 1.02
    assert over_dry_run(Job(ALL), resident_bytes=3000) < 1.2
    assert over_dry_run(DEEP, resident_bytes=3000) < 1.02


def test_without_a_pipeline_the_end_of_a_forward_stays_within_a_budget() -> None:
    """MiB that left one H200."""
    job = Job(ALL, pipeline=1, virtual=1, num_microbatches=4)
    (stats,) = run(job, resident_bytes=3072).stats
    assert stats.copied_out_bytes >> 10 == 27544


def test_nothing_leaves_that_fits_a_budget() -> None:
    assert [stats.copied_out_bytes for stats in run(Job(ALL), resident_bytes=13000).stats] == [0, 0]
    first, last = run(Job(ALL), resident_bytes=9000).stats
    assert first.copied_out_bytes > 0 == last.copied_out_bytes


@pytest.mark.parametrize(("pipeline", "virtual", "layers"), [(1, 1, 4), (2, 1, 8), (2, 4, 8), (4, 2, 16), (8, 1, 16)])
def test_what_the_link_carries_easily_costs_next_to_nothing(pipeline: int, virtual: int, layers: int) -> None:
    job = Job(("core_attn",), pipeline, virtual, num_microbatches=8, layers=layers)
    outcome = run(job)
    assert outcome.milliseconds < 1.01 * run(job, dry_run=True).milliseconds
    assert sum(stats.prefetch_misses for stats in outcome.stats) == 0
