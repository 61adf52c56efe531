# SPDX-License-Identifier: Apache-2.0
"""A rank that shares its record when the process group is gone does not take itself for rank 0."""

from __future__ import annotations

import torch

from offload_engine.rank_reports import RankReports
from tests.dist.launch import PlainGroup, run_ranks


def test_only_rank_0_has_the_tables() -> None:
    assert run_ranks(_share_at_exit, world_size=2, pipeline=PlainGroup()) == [True, False]


def _share_at_exit() -> bool:
    reports = RankReports("x")
    reports.announce()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return reports.share(None)
