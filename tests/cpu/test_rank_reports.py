# SPDX-License-Identifier: Apache-2.0
"""Records of one step on their way to rank 0: who is waited for, for how long, and who is not."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from offload_engine._observe.report import report_table
from offload_engine.rank_reports import RankReports
from tests.cpu.test_observe_report import a_step
from tests.dist.launch import PlainGroup, run_ranks

STEP = replace(a_step(), num_pipeline_ranks=3)


def test_without_a_process_group_there_is_one_rank() -> None:
    for record, table in ((a_step(), report_table([a_step()])), (None, "")):
        reports = RankReports("x")
        reports.announce()
        assert reports.share(record) and reports.table() == table


def test_rank_0_gets_the_tables_of_all() -> None:
    first, *rest = run_ranks(_share_twice, world_size=3, pipeline=PlainGroup())
    assert rest == [[False, False], [False, False]]
    expected = report_table([replace(STEP, rank=rank, pipeline_rank=rank) for rank in range(3)])
    assert first == [expected, expected], "under one name, the second time begins anew"


def _share_twice() -> list[str | bool | None]:
    rank = torch.distributed.get_rank()
    found: list[str | bool | None] = []
    for _ in range(2):
        reports = RankReports("x")
        reports.announce()
        torch.distributed.barrier()  # a training step
        is_first = reports.share(replace(STEP, rank=rank, pipeline_rank=rank))
        torch.distributed.barrier()  # another one
        found.append(reports.table() if is_first else False)
        torch.distributed.barrier()
    return found


@pytest.mark.parametrize(("announces", "is_last_look"), [(True, False), (True, True), (False, False)])
def test_a_rank_that_never_shares_is_looked_for_only_so_long(announces: bool, is_last_look: bool) -> None:
    """A last look takes what is there, and who has announced nothing is not looked for."""
    (looks, wait_s), *_ = run_ranks(_share_on_some, announces, is_last_look, world_size=3, pipeline=PlainGroup())
    missing = "2 other ranks offload, but had no record of this step in time\n" if announces else ""
    table = report_table([STEP]) + missing
    assert looks == ([None, table] if announces and not is_last_look else [table]) and wait_s < 0.5, "no look waits"


def _share_on_some(announces: bool, is_last_look: bool) -> tuple[list[str | None], float]:
    """Rank 1 has nothing to share after all, rank 2 goes away."""
    rank, reports = torch.distributed.get_rank(), RankReports("x", timeout_s=0.5)
    if rank == 0 or announces:
        reports.announce()
    torch.distributed.barrier()
    if rank == 1:
        reports.share(None)
    torch.distributed.barrier()
    looks: list[str | None] = []
    wait_s = 0.0
    if rank == 0:
        begin = time.monotonic()
        reports.share(STEP)
        looks.append(reports.table(is_last_look))
        wait_s = time.monotonic() - begin
        if looks[0] is None:
            time.sleep(0.5)
            looks.append(reports.table())
    torch.distributed.barrier()
    return looks, wait_s
