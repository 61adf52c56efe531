"""Records of one step on their way to rank 0: who is waited for, for how long, and who is not."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from offload_engine._observe.report import report_table
from offload_engine.rank_reports import RankReports
from tests.cpu.test_observe_report import a_step
from tests.dist.launch import PlainGroup, run_ranks

STEP = replace(a_step(), num_pipeline_ranks=3)


def test_without_a_process_group_there_is_one_rank() -> None:
    reports = RankReports("x")
    reports.announce()
    assert reports.share(a_step()) == report_table([a_step()])
    assert reports.share(None) == ""


def test_rank_0_gets_the_tables_of_all() -> None:
    first, *rest = run_ranks(_share_twice, world_size=3, pipeline=PlainGroup())
    assert rest == [[None, None], [None, None]]
    expected = report_table([replace(STEP, rank=rank, pipeline_rank=rank) for rank in range(3)])
    assert first == [expected, expected], "under one name, the second time begins anew"


def _share_twice() -> list[str | None]:
    rank = torch.distributed.get_rank()
    texts = []
    for _ in range(2):
        reports = RankReports("x")
        reports.announce()
        torch.distributed.barrier()  # a training step
        texts.append(reports.share(replace(STEP, rank=rank, pipeline_rank=rank)))
        torch.distributed.barrier()
    return texts


def test_a_rank_that_never_shares_is_waited_for_only_so_long() -> None:
    (text, wait_s), *_ = run_ranks(_share_on_some, True, world_size=3, pipeline=PlainGroup())
    assert text == report_table([STEP]) + "2 other ranks offload, but had no record of this step in time\n"
    assert 0.5 <= wait_s < 5


def test_a_rank_that_announces_nothing_is_not_waited_for() -> None:
    (text, wait_s), *others = run_ranks(_share_on_some, False, world_size=3, pipeline=PlainGroup())
    assert text == report_table([STEP]) and wait_s < 0.5
    assert all(other == (None, 0.0) for other in others)


def _share_on_some(announces: bool) -> tuple[str | None, float]:
    """Rank 1 has nothing to share after all, rank 2 goes away."""
    rank, reports = torch.distributed.get_rank(), RankReports("x", timeout_s=0.5)
    if rank == 0 or announces:
        reports.announce()
    torch.distributed.barrier()
    begin = time.monotonic()
    text = None if rank == 2 else reports.share(STEP if rank == 0 else None)
    wait_s = time.monotonic() - begin if rank == 0 else 0.0
    torch.distributed.barrier()
    return text, wait_s
