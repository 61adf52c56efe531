# SPDX-License-Identifier: Apache-2.0
"""What ranks take for the same that have measured something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import pytest

from offload_engine._budget.agreement import Agree, agreed_job, agreed_link, agreed_model, agreed_times
from offload_engine.planning.clocks import Link
from offload_engine.planning.memory import Job, MeasuredMemory, make_memory_model
from offload_engine.planning.residents import Residents
from offload_engine.planning.shapes import ChunkShape, GroupShape, Shapes
from tests.meeting import Meeting

T = TypeVar("T")
R = TypeVar("R")


def on_ranks(function: Callable[[Agree, T], R], own: Sequence[T]) -> list[R]:
    """Call a function on as many ranks, each with its own argument."""
    meeting = Meeting(len(own))
    with ThreadPoolExecutor(len(own)) as ranks:
        return list(ranks.map(function, (partial(meeting.agree, rank) for rank in range(len(own))), own))


def shapes_of(*parts: tuple[int, float]) -> Shapes:
    """Return a chunk with groups of so many bytes, and a forward of so many ms."""
    return (ChunkShape(tuple(GroupShape("experts", 0, nbytes, ms, 2 * ms) for nbytes, ms in parts), head_ms=1.0),)


def test_ranks_that_measured_the_same_keep_it() -> None:
    shapes = shapes_of((100, 0.1), (300, 0.7))
    for found in on_ranks(agreed_job, [shapes, shapes]):
        assert found == (shapes, 1.0, True)


def test_bytes_are_the_largest_and_times_together_those_of_one_rank() -> None:
    """One has much in one layer, the other in the next. Each waits for the other meanwhile."""
    own = shapes_of((400, 4.0), (100, 3.0)), shapes_of((200, 4.0), (300, 2.0))
    first, second = on_ranks(agreed_job, own)
    assert first.shapes == second.shapes
    assert [group.nbytes for group in first.shapes[0].groups] == [400, 300]
    assert first.most_share == second.most_share == 5 / 7 and not (first.are_own or second.are_own)
    assert first.shapes[0].groups[0].forward_ms == 4.0, "each time is the longest, and the first rank has all of these"
    own = shapes_of((0, 4.0), (0, 1.0)), shapes_of((0, 2.0), (0, 4.0))
    [shape] = on_ranks(agreed_job, own)[0].shapes
    share = (3 * (2.0 + 4.0) + 1.0) / (3 * (4.0 + 4.0) + 1.0)
    times = [(group.forward_ms, group.backward_ms) for group in shape.groups]
    assert times == [pytest.approx((share * 4.0, share * 8.0))] * 2 and shape.head_ms == pytest.approx(share)


def test_actions_take_together_as_long_as_on_one_rank() -> None:
    for found in on_ranks(agreed_times, [(3.0, 1.0), (1.0, 2.0)]):
        assert found == pytest.approx((3.0 * 4 / 5, 2.0 * 4 / 5))
    assert on_ranks(agreed_times, [(0.0,), (0.0,)]) == [(0.0,)] * 2


def test_the_slowest_link_seems_faster_if_no_rank_copies_all() -> None:
    links = Link(40.0, 30.0), Link(50.0, 20.0)
    for found in on_ranks(lambda agree, link: agreed_link(agree, link, 0.5), links):
        assert (found.out_gbps, found.in_gbps) == (80.0, 40.0)


def test_what_is_outside_of_allocators_is_not_what_one_reserves_more_in_vain_than_another() -> None:
    measured = MeasuredMemory((), 0, overhead_bytes=17, wasted_bytes=5), MeasuredMemory((), 0, 16, wasted_bytes=2)
    models = [make_memory_model(Job((), ()), each, is_early_certain=False) for each in measured]
    nothing = Residents({}, 0, 0)
    for model in on_ranks(lambda agree, own: agreed_model(agree, own, ()), models):
        assert model.overhead_with(nothing, wasted_bytes=1) == 14 + 1, "outside of one"
        assert model.overhead_with(nothing) == 14 + 5, "in vain on the other"
