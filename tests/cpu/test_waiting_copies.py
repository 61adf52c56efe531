# SPDX-License-Identifier: Apache-2.0
"""Copy-outs that are delayed until the host has launched the kernels that the device waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from offload_engine import ChunkKey, ChunkOffloadHandler, GroupTraits, OffloadConfig, OffloadEngine
from offload_engine.schedule import no_pipelining
from tests.adversarial import AdversarialDevice
from tests.engine_state import release_all

GROUP_BYTES = 256
DELAYED = GroupTraits(may_delay=True)


class Bench:
    """A chunk on a device whose copies complete when they are awaited."""

    def __init__(self, **settings: int) -> None:
        self.device = AdversarialDevice(host_capacity=1 << 16)
        self.engine = OffloadEngine(OffloadConfig.from_flags(**{"min_tensor_bytes": 0, **settings}), self.device)
        self.engine.begin_iteration(no_pipelining(1))
        self.chunk: ChunkOffloadHandler = self.engine.start_chunk(ChunkKey(0, 0))
        self.handles: list[object] = []

    def commit(self, *, may_delay: bool = False) -> None:
        self.chunk.open_group("group", GroupTraits(may_delay=may_delay))
        self.handles.append(self.chunk.tensor_push(torch.full((GROUP_BYTES,), len(self.handles), dtype=torch.uint8)))
        self.chunk.close_group()

    def backward(self) -> None:
        self.chunk.end_forward()
        for index in reversed(range(len(self.handles))):
            self.chunk.on_group_commit_backward(self.chunk.groups[index])
            assert (self.chunk.tensor_pop(self.handles.pop()) == index).all()
        self.engine.end_iteration()
        self.engine.close()
        assert self.device.hazards == []

    @property
    def leaving(self) -> list[int]:
        """List the groups with a copy-out that is not released."""
        return [group.index for group in self.engine.snapshot().leaving]

    @property
    def delayed(self) -> Any:
        return self.engine._executor.policy._delayed

    @property
    def num_copied(self) -> float:
        return self.engine.stats.copied_out_bytes / GROUP_BYTES


def test_they_wait_until_the_device_has_work_again() -> None:
    bench = Bench()
    bench.commit()  # the limit on what is in flight is learned from it
    bench.commit(may_delay=True)
    assert bench.num_copied == 1
    bench.chunk.note_launch()
    assert bench.num_copied == 2
    bench.chunk.note_launch()
    assert bench.num_copied == 2
    bench.backward()


def test_they_wait_for_nothing_that_came_after_their_commit() -> None:
    """Otherwise the copy would be queued behind the work that it has waited for."""
    bench = Bench()
    with bench.device.observe_compute():
        bench.commit()
        bench.commit(may_delay=True)
        compute = bench.device.current_stream()
        committed = compute.clock[compute.index]
        torch.ones(1)
    bench.chunk.note_launch()
    waited_for = bench.engine._store._context.copy_out_stream.clock[compute.index]
    assert waited_for <= committed < compute.clock[compute.index]
    bench.backward()


def test_write_to_a_sibling_after_the_commit_is_a_new_save() -> None:
    """The copy does not stand behind that write, so it may or may not have it."""
    bench = Bench(max_inflight_bytes=1 << 20)
    first, second = torch.zeros(2 * GROUP_BYTES, dtype=torch.uint8).unsafe_chunk(2)
    bench.chunk.open_group("group", DELAYED)
    waiting = bench.chunk.tensor_push(first.fill_(1))
    bench.chunk.close_group()
    assert bench.num_copied == 0
    bench.chunk.open_group("group")
    pushed = bench.chunk.tensor_push(second.fill_(2))
    bench.chunk.close_group()
    assert bench.num_copied == 2 * 2
    assert (bench.chunk.tensor_pop(waiting) == 1).all() and (bench.chunk.tensor_pop(pushed) == 2).all()
    del waiting, pushed
    bench.backward()


def test_delayed_copies_are_issued_in_order_and_before_an_undelayed_one() -> None:
    bench = Bench(max_inflight_bytes=1 << 20)
    bench.commit(may_delay=True)
    bench.commit(may_delay=True)
    assert bench.num_copied == 0
    bench.commit()
    assert bench.num_copied == 3
    queued = bench.leaving
    assert queued == [0, 1, 2]
    bench.backward()


def test_copies_completed_by_the_launch_are_released() -> None:
    bench = Bench()
    bench.commit()
    bench.device.synchronize_all()
    bench.chunk.note_launch()
    assert bench.engine.snapshot().inflight_bytes == 0
    bench.backward()


def test_before_the_storage_is_taken_from_its_holders() -> None:
    bench = Bench(max_inflight_bytes=1 << 20)
    held = torch.ones(GROUP_BYTES, dtype=torch.uint8)
    bench.chunk.open_group("group", DELAYED)
    handle = bench.chunk.tensor_push(held)
    bench.chunk.close_group()
    bench.engine.held_elsewhere(held)
    assert bench.num_copied == 1
    release_all(bench.engine)
    assert held.untyped_storage().nbytes() == 0
    assert (bench.chunk.tensor_pop(handle) == 1).all()


@pytest.mark.parametrize(
    "come_to",
    [
        lambda bench: bench.chunk.end_forward(),
        lambda bench: bench.engine.start_chunk(ChunkKey(0, 1)),
        lambda bench: bench.chunk.on_group_commit_backward(bench.chunk.groups[0]),
    ],
    ids=["the end of the forward", "the next forward", "a backward"],
)
def test_they_wait_no_longer_than_to(come_to: Callable[[Bench], object]) -> None:
    bench = Bench(max_inflight_bytes=1 << 20)
    bench.commit(may_delay=True)
    assert bench.num_copied == 0
    come_to(bench)
    assert bench.num_copied == 1
    bench.engine.reset_iteration()


def test_they_wait_no_longer_than_the_iteration() -> None:
    bench = Bench(max_inflight_bytes=1 << 20)
    bench.commit(may_delay=True)
    bench.handles.clear()
    bench.engine.end_iteration()
    assert bench.delayed == []


@pytest.mark.parametrize("limit", [0, 2 * GROUP_BYTES, 6 * GROUP_BYTES])
def test_at_most_half_of_the_limit_in_flight_is_delayed(limit: int) -> None:
    """One more, and all are issued; they fit, so compute need not wait for copies that have just begun."""
    bench = Bench(max_inflight_bytes=limit)
    most = limit // GROUP_BYTES // 2
    for _ in range(most):
        bench.commit(may_delay=True)
    assert bench.num_copied == 0
    bench.commit(may_delay=True)
    assert bench.num_copied == most + 1
    assert bench.engine.snapshot().inflight_bytes == (most + 1) * GROUP_BYTES * (limit > 0)
    bench.backward()


def test_nothing_waits_where_the_link_is_behind() -> None:
    bench = Bench(max_inflight_bytes=2 * GROUP_BYTES)
    bench.commit()
    bench.commit()
    bench.commit(may_delay=True)
    assert bench.num_copied == 3
    bench.device.synchronize_all()
    bench.chunk.note_launch()
    bench.commit(may_delay=True)
    assert bench.num_copied == 3
    bench.backward()


def test_nothing_waits_where_groups_on_the_device_are_counted() -> None:
    bench = Bench(horizon_groups=3)
    bench.commit()
    bench.commit(may_delay=True)
    assert bench.num_copied == 2
    bench.backward()


@pytest.mark.parametrize("settings", [{}, {"host_limit_bytes": 2 * GROUP_BYTES}, {"min_tensor_bytes": 2 * GROUP_BYTES}])
def test_tail_does_not_count_groups_without_a_copy_out(settings: dict[str, int]) -> None:
    """The host tier is full, or nothing in the group is large enough to move."""
    bench = Bench(**settings)
    bench.engine._executor.leaving.largest_bytes = 1 << 19  # so that nothing is released before the backward
    for _ in range(3):
        bench.commit(may_delay=True)
    bench.chunk.begin_tail()
    num_before = len(bench.leaving)
    bench.chunk.note_launch()
    bench.commit()
    num_in_tail = len(bench.leaving) - num_before
    bench.engine.start_chunk(ChunkKey(0, 1)).begin_backward()
    assert len(bench.leaving) == num_in_tail
    bench.engine.reset_iteration()


def test_under_a_budget_nothing_waits() -> None:
    """There what is to stay is decided at the commit, by what is resident."""
    bench = Bench(resident_bytes=GROUP_BYTES)
    bench.commit(may_delay=True)
    bench.commit(may_delay=True)
    assert bench.engine.stats.num_offloaded_groups == 2
    bench.backward()


def test_a_reset_forgets_them() -> None:
    bench = Bench(max_inflight_bytes=1 << 20)
    bench.commit(may_delay=True)
    bench.engine.reset_iteration()
    assert bench.delayed == []
    bench.handles.clear()
    bench.engine.begin_iteration(no_pipelining(1))
    bench.chunk = bench.engine.start_chunk(ChunkKey(0, 0))
    bench.chunk.note_launch()
    assert bench.num_copied == 0
    bench.commit()
    bench.backward()
