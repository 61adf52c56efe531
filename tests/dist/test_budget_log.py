# SPDX-License-Identifier: Apache-2.0
"""The tables of budgets: of all stages, once, on rank 0, when decisions hold, or at the end of a shorter run."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_patches import apply
from offload_engine._budget.view import BudgetView
from tests.dist.launch import Pipeline, on_ranks, run_ranks
from tests.dist.test_gpu_budget import optimizer_of
from tests.dist.tiny import ALL, engine_of, make_chunks, make_config, messages, run

NUM_STEPS = 12


class Seen:
    """What one rank has logged of its budget, in which steps, and the figures that it has itself."""

    def __init__(self, num_steps: int = NUM_STEPS, **settings: Any) -> None:
        logging.getLogger("megatron_patches._budget_log").setLevel(logging.INFO)
        logged, steps = messages(), list[int]()
        with apply(ALL) as handle:
            chunks = make_chunks(make_config(offload_gpu_budget="1TiB", **settings))
            optimizer = optimizer_of(chunks)
            for number in range(num_steps):
                run(chunks, 4)
                torch.distributed.barrier()
                optimizer.step()
                steps += [number] * (sum("within its budget" in text for text in logged) - len(steps))
            view: Any = engine_of(handle).budget
            self.summary, self.groups = view.summary, None if view.summary is None else view.of_stage(0).groups
        self.in_steps = steps
        self.tables = [text for text in logged if "within its budget" in text]

    def rows(self) -> list[list[str]]:
        return [re.split(r"\s*[│┃]\s*", line)[1:-1] for line in self.tables[0].splitlines() if line[0] in "│┃"]


def mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f}"


def test_rank_0_has_the_tables_of_all_stages_when_they_hold() -> None:
    first, second = run_ranks(Seen, pipeline=Pipeline(2))
    assert len(first.in_steps) == len(first.tables) == 1 and first.in_steps[0] >= 7 and not second.tables
    rows = first.rows()
    for stage, rank in enumerate((first, second)):
        of_stage = [cells[1:] for cells in rows if cells[0] == str(stage)]
        assert [cells[:2] for cells in of_stage if cells[0] == "predicted"] == [
            ["predicted", mib(rank.summary.predicted_peak_bytes)]
        ]
        kept = {name: mib(nbytes) for name, nbytes, *_ in rank.groups}
        assert len(kept) > 2 and {name: text for name, text, *_ in of_stage if name in kept} == kept


def test_without_a_pipeline_there_is_no_column_for_stages() -> None:
    (only,) = run_ranks(Seen)
    assert [cells[0] for cells in only.rows()][:1] == ["group"] and "stage" not in only.tables[0]


def test_a_run_that_ends_first_has_them_at_its_end() -> None:
    first, second = run_ranks(Seen, 5, pipeline=Pipeline(2))
    assert first.in_steps == [] and len(first.tables) == 1 and "lowest budget" in first.tables[0] and not second.tables
    (only,) = run_ranks(Seen, 2)
    assert only.summary is None and not only.tables, "nothing has been decided"


def test_it_can_be_switched_off() -> None:
    assert not run_ranks(_see_nothing)[0].tables


def _see_nothing() -> Seen:
    return Seen(offload_report=False)


@on_ranks(Pipeline(2))
def test_rank_0_does_not_wait_for_a_stage_that_never_decides() -> None:
    with _deciding_on(0):
        seen = Seen(num_steps=NUM_STEPS + 40)
    if torch.distributed.get_rank() == 0:
        assert len(seen.in_steps) == 1 and seen.in_steps[0] > 32 and "without 1 other rank: " in seen.tables[0]


@contextmanager
def _deciding_on(rank: int) -> Iterator[None]:
    decides = torch.distributed.get_rank() == rank
    own = vars(BudgetView)["has_result"].fget
    result = property(lambda view: decides and own(view))
    with mock.patch.object(BudgetView, "has_result", result):
        yield


@pytest.mark.parametrize("num_steps", [5, NUM_STEPS])
@on_ranks()
def test_the_file_of_a_plan_is_written_when_it_holds_or_at_the_end(num_steps: int, tmp_path: Path) -> None:
    Seen(num_steps, offload_plan=f"{tmp_path}/plan.json")
    assert (tmp_path / "plan.json").exists()
