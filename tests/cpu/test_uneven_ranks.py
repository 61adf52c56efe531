# SPDX-License-Identifier: Apache-2.0
"""Two ranks that decide alike, and of which each has more bytes than the other in some layers, as experts have."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from offload_engine.planning.steps import Decision
from offload_engine.schedule import one_forward_one_backward
from tests.cpu.test_replay import FLOOR, HOLD, MEASURE, MIB, VERIFY, Job
from tests.meeting import Meeting

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTHS = (3, 6, 2, 4, 3, 5), (4, 4, 3, 3, 4, 4)
NUM_STEPS = 8


def run(widths: Sequence[tuple[int, ...]], budget: int, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Train on one thread for each rank."""
    jobs = [Job(budget, monkeypatch, widths=own) for own in widths]
    of_thread = threading.local()
    monkeypatch.setattr(
        "offload_engine._budget.allocations.address_of",
        lambda tensor: of_thread.job.account.addresses[tensor.untyped_storage()._cdata],
    )
    meeting = Meeting(len(jobs))

    def train(rank: int) -> None:
        of_thread.job = job = jobs[rank]
        controller: Any = job.engine.budget
        agree = partial(meeting.agree, rank)
        controller.decider.join(agree, agree)
        for _ in range(NUM_STEPS):
            job.step()

    with ThreadPoolExecutor(len(jobs)) as threads:
        list(threads.map(train, range(len(jobs))))
    return jobs


@pytest.mark.parametrize("mib", [125, 140, 155])
def test_both_believe_their_replays_and_hold_no_more_than_predicted(mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = run(WIDTHS, mib * MIB, monkeypatch)
    deciders: list[Any] = [job.engine.budget.decider for job in jobs]  # type: ignore[union-attr]
    one, other = (decider.chosen.best for decider in deciders)
    assert one.decision == other.decision != Decision() and one.num_moves
    assert None not in (one.arena_bytes, other.arena_bytes)
    for job in jobs:
        assert [state for state, _, _ in job.steps] == [FLOOR, FLOOR, MEASURE, VERIFY, VERIFY, HOLD, HOLD, HOLD]
    [predicted] = {predicted for job in jobs for state, predicted, _ in job.steps if state is VERIFY}
    held = [max(held for state, _, held in job.steps if state in (VERIFY, HOLD)) for job in jobs]
    assert 0.95 * predicted < max(held) <= predicted <= mib * MIB
    [corrected] = {job.steps[-1][1] for job in jobs}
    assert corrected == max(held)


@pytest.mark.parametrize("mib", [110, 130, 150, 180])
def test_microbatches_that_save_unlike_bytes_hold_what_is_predicted(mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are planned by the most bytes of each group, which none has; they are released by their own."""
    job = Job(mib * MIB, monkeypatch, tuple(one_forward_one_backward(1, 0, 3)), vary=True)
    for _ in range(NUM_STEPS):
        job.step()
    assert [state for state, _, _ in job.steps] == [FLOOR, FLOOR, MEASURE, VERIFY, VERIFY, HOLD, HOLD, HOLD]
    best = job.engine.budget.decider.chosen.best  # type: ignore[union-attr]
    assert best.arena_bytes is not None and best.num_moves
    assert all(predicted == held <= mib * MIB for state, predicted, held in job.steps if state in (VERIFY, HOLD))


def test_a_first_decision_leaves_as_much_as_steps_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its second step would be judged to have too little left, and another decision would take two more."""
    widths = 5, 4, 5, 4, 5, 4, 5, 5
    job = Job(170 * MIB, monkeypatch, widths=widths)
    for number in range(NUM_STEPS):
        job.widths = (5, 4, 5, 4, 4, 4, 5, 5) if number == 1 else widths
        job.step()
    assert [state for state, _, _ in job.steps] == [FLOOR, FLOOR, MEASURE, VERIFY, VERIFY, HOLD, HOLD, HOLD]
    decider = job.engine.budget.decider  # type: ignore[union-attr]
    left = decider.budget_bytes - decider.chosen.best.held_bytes  # type: ignore[union-attr]
    assert left > decider.margin_bytes > 4 * MIB
