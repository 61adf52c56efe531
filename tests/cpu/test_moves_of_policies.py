# SPDX-License-Identifier: Apache-2.0
"""When groups leave, are released and return, under the policies that follow no plan.

Which copies are made at which boundary is compared with the planner's by test_plan_and_policy.py. Here is what no plan
has: releases, by the count of resident bytes; copy-outs that are delayed until the host has launched the kernels that
the device waits for; what is recalled; and budgets of resident bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from offload_engine import (
    ChunkKey,
    ChunkOffloadHandler,
    GroupTraits,
    OffloadConfig,
    OffloadEngine,
    ResidencyMeter,
    ResidentLayers,
)
from offload_engine.schedule import parse_actions
from tests.adversarial import AdversarialDevice
from tests.engine_state import release_all

GROUP_BYTES = 256
FIRST, SECOND = ChunkKey(0, 0), ChunkKey(0, 1)
TWO, AT_ONCE = "F0.0 F0.1 B0.0 B0.1", "F0.0 B0.0 F0.1 B0.1"
NAMES = "attention mlp attention mlp attention mlp"
NUM_GROUPS = 6
KEPT = frozenset({NUM_GROUPS - 2, NUM_GROUPS - 1})
DELAYED = GroupTraits(may_delay=True)


class Bench:
    """Chunks of equal groups, and copies that complete when they are awaited or `device.synchronize_all()` is called.

    Two groups make a layer.
    """

    def __init__(
        self, order: str | None = TWO, device: type[AdversarialDevice] = AdversarialDevice, **settings: int
    ) -> None:
        self.device = device(host_capacity=1 << 16)
        self.meter = ResidencyMeter()
        config = OffloadConfig.from_flags(**{"min_tensor_bytes": 0, **settings})
        self.engine = OffloadEngine(config, self.device, self.meter)
        self.actions = None if order is None else parse_actions(order)
        self.engine.begin_iteration(self.actions)
        self.handles: dict[ChunkOffloadHandler, list[object]] = {}

    def start(self, key: ChunkKey | None = None, **options: Any) -> ChunkOffloadHandler:
        chunk = self.engine.start_chunk(key, **options)
        self.handles[chunk] = []
        return chunk

    def save(self, chunk: ChunkOffloadHandler, name: str = "group", traits: GroupTraits | None = None) -> None:
        handles = self.handles[chunk]
        chunk.open_group(name, traits)
        handles.append(chunk.tensor_push(torch.full((GROUP_BYTES,), len(handles), dtype=torch.uint8)))
        chunk.close_group()

    def forward(
        self,
        key: ChunkKey | None = FIRST,
        names: str = NAMES,
        num_in_tail: int | None = None,
        ends: bool = True,
        **options: Any,
    ) -> ChunkOffloadHandler:
        chunk = self.start(key, **options)
        num_left = len(names.split())
        for index, name in enumerate(names.split()):
            self.save(chunk, name, GroupTraits(layer=index // 2))
            num_left -= 1
            if num_left == num_in_tail:
                chunk.begin_tail()
        if ends:
            chunk.end_forward()
        return chunk

    def begin_backward(self, chunk: ChunkOffloadHandler) -> None:
        chunk.on_group_commit_backward(chunk.groups[-1])

    def backward(self, chunk: ChunkOffloadHandler) -> None:
        handles = self.handles[chunk]
        for index in reversed(range(len(handles))):
            chunk.on_group_commit_backward(chunk.groups[index])
            assert (chunk.tensor_pop(handles.pop()) == index).all()
            chunk.on_group_start_backward()

    def finish(self) -> int:
        """Finish the step; return how many storages were late."""
        self.handles.clear()
        misses = self.engine.end_iteration().prefetch_misses
        self.engine.close()
        assert self.device.hazards == []
        return misses

    @property
    def resident_groups(self) -> float:
        return self.meter.current_bytes / GROUP_BYTES

    @property
    def num_copied_out(self) -> float:
        return self.engine.stats.copied_out_bytes / GROUP_BYTES

    @property
    def leaving(self) -> list[int]:
        """List the groups with a copy-out that is not released."""
        return [group.index for group in self.engine.snapshot().leaving]


# ---- releases where a backward follows a forward ----


@pytest.mark.parametrize("num_in_tail", [0, 2])
def test_copy_outs_before_the_tail_are_released_where_the_next_backward_begins(num_in_tail: int) -> None:
    """What the tail copied out itself is left: these copies have just been issued."""
    bench = Bench(horizon_bytes=0)
    first = bench.forward(FIRST)
    bench.forward(SECOND, num_in_tail=num_in_tail)
    assert bench.resident_groups == 2  # a wait any sooner would delay what the next stage of the pipeline gets
    first.begin_backward()
    assert bench.resident_groups == num_in_tail
    bench.begin_backward(first)
    assert bench.resident_groups == num_in_tail + 1  # the one in use
    bench.finish()


def test_completed_copy_outs_are_released_before_an_allocation() -> None:
    bench = Bench(horizon_bytes=GROUP_BYTES)
    first = bench.forward(FIRST)
    bench.forward(SECOND)
    assert bench.resident_groups == 2 + 1
    bench.device.synchronize_all()
    bench.meter.reset_peak()
    bench.begin_backward(first)
    assert bench.resident_groups == 1 + 1  # the one in use, and one ahead
    assert bench.meter.peak_bytes == 3 * GROUP_BYTES  # never more than before
    bench.finish()


@pytest.mark.parametrize(("has_head", "before_head"), [(True, 1), (False, 0)])
def test_copies_of_the_layer_before_the_last_may_be_in_flight_until_the_head_begins(
    has_head: bool, before_head: int
) -> None:
    """Released where the last layer begins, they would leave the link without work while it runs.

    What has had the time of a whole layer is: the first part of the layer before, and anything older.
    """
    bench = Bench(AT_ONCE, horizon_bytes=3 * GROUP_BYTES)
    chunk = bench.forward(FIRST, keep_groups=KEPT, has_head=has_head)
    assert bench.resident_groups == len(KEPT) + before_head
    chunk.begin_head()
    assert bench.resident_groups == len(KEPT)
    for _ in range(2):  # once for each gradient of the logits
        chunk.end_loss()
        assert bench.resident_groups == len(KEPT) + 3
    bench.finish()


def test_a_group_of_the_same_name_in_the_last_layer_has_not_had_the_time_of_a_layer() -> None:
    """Only the last of several places of a name stays: that the others have just been copied says nothing of it."""
    bench = Bench(AT_ONCE)
    names = "projection " * NUM_GROUPS
    bench.forward(FIRST, names, keep_groups=frozenset({NUM_GROUPS - 1}), has_head=True)
    assert bench.leaving == [NUM_GROUPS - 2]
    bench.finish()


# ---- copy-ins ----


@pytest.mark.parametrize("is_used", [True, False])
def test_copy_ins_are_ahead_until_awaited_or_unused(is_used: bool) -> None:
    """Till then host bytes that they read are lent last."""
    bench = Bench(horizon_bytes=3 * GROUP_BYTES, max_inflight_bytes=0)
    first = bench.forward(FIRST, "qkv qkv qkv qkv")
    bench.forward(SECOND, "qkv")
    ahead = bench.engine._store._mover._unawaited
    assert len(ahead) == 3
    if is_used:
        first.tensor_pop(bench.handles[first][-1])
        assert len(ahead) == 2
        bench.backward(first)
        assert len(ahead) == 1, "that of the second chunk"
    bench.handles.clear()
    assert len(ahead) == 0
    bench.finish()


# ---- copy-outs that are delayed ----


def delay(bench: Bench, chunk: ChunkOffloadHandler, num_groups: int = 1) -> None:
    for _ in range(num_groups):
        bench.save(chunk, traits=DELAYED)


def test_they_wait_until_the_device_has_work_again_but_not_where_the_link_is_behind() -> None:
    bench = Bench(AT_ONCE, max_inflight_bytes=2 * GROUP_BYTES)
    chunk = bench.start(FIRST)
    bench.save(chunk)
    delay(bench, chunk)
    assert bench.num_copied_out == 1
    for _ in range(2):
        chunk.note_launch()
        assert bench.num_copied_out == 2
    delay(bench, chunk)
    assert bench.num_copied_out == 3
    bench.device.synchronize_all()
    chunk.note_launch()
    assert bench.engine.snapshot().inflight_bytes == 0, "completed by then"
    delay(bench, chunk)
    assert bench.num_copied_out == 3
    bench.backward(chunk)
    bench.finish()


def test_they_wait_for_nothing_that_came_after_their_commit() -> None:
    """Otherwise the copy would be queued behind the work that it has waited for."""
    bench = Bench(AT_ONCE)
    chunk = bench.start(FIRST)
    with bench.device.observe_compute():
        bench.save(chunk)
        delay(bench, chunk)
        compute = bench.device.current_stream()
        committed = compute.clock[compute.index]
        torch.ones(1)
    chunk.note_launch()
    waited_for = bench.engine._store.context.copy_out_stream.clock[compute.index]
    assert waited_for <= committed < compute.clock[compute.index]
    bench.backward(chunk)
    bench.finish()


def test_write_to_a_sibling_after_the_commit_is_a_new_save() -> None:
    """The copy does not stand behind that write, so it may or may not have it."""
    bench = Bench(AT_ONCE, max_inflight_bytes=1 << 20)
    chunk = bench.start(FIRST)
    first, second = torch.zeros(2 * GROUP_BYTES, dtype=torch.uint8).unsafe_chunk(2)
    chunk.open_group("group", DELAYED)
    waiting = chunk.tensor_push(first.fill_(1))
    chunk.close_group()
    assert bench.num_copied_out == 0
    chunk.open_group("group")
    pushed = chunk.tensor_push(second.fill_(2))
    chunk.close_group()
    assert bench.num_copied_out == 2 * 2
    assert (chunk.tensor_pop(waiting) == 1).all() and (chunk.tensor_pop(pushed) == 2).all()
    del waiting, pushed
    bench.finish()


def test_they_are_issued_in_order_and_before_an_undelayed_one_and_a_reset_forgets_them() -> None:
    bench = Bench(AT_ONCE, max_inflight_bytes=1 << 20)
    delay(bench, bench.start(FIRST))
    bench.handles.clear()
    bench.engine.reset_iteration()
    policy: Any = bench.engine._executor.policy
    assert policy._delayed == []
    bench.engine.begin_iteration(bench.actions)
    chunk = bench.start(FIRST)
    chunk.note_launch()
    delay(bench, chunk, 2)
    assert bench.num_copied_out == 0
    bench.save(chunk)
    assert bench.num_copied_out == 3 and bench.leaving == [0, 1, 2]
    bench.backward(chunk)
    bench.finish()


def test_they_count_for_the_horizon() -> None:
    bench = Bench(AT_ONCE, max_inflight_bytes=1 << 20)
    chunk = bench.start(FIRST)
    delay(bench, chunk, 4)
    chunk.end_forward()
    release_all(bench.engine)
    assert bench.resident_groups == 0
    bench.begin_backward(chunk)
    assert bench.resident_groups == 3, "twice the largest ahead"
    bench.backward(chunk)
    bench.finish()


def test_they_are_issued_before_the_storage_is_taken_from_its_holders() -> None:
    bench = Bench(AT_ONCE, max_inflight_bytes=1 << 20)
    chunk, held = bench.start(FIRST), torch.ones(GROUP_BYTES, dtype=torch.uint8)
    chunk.open_group("group", DELAYED)
    handle = chunk.tensor_push(held)
    chunk.close_group()
    bench.engine.held_elsewhere(held)
    assert bench.num_copied_out == 1
    release_all(bench.engine)
    assert held.untyped_storage().nbytes() == 0 and (chunk.tensor_pop(handle) == 1).all()


@pytest.mark.parametrize("settings", [{}, {"host_limit_bytes": 2 * GROUP_BYTES}, {"min_tensor_bytes": 2 * GROUP_BYTES}])
def test_tail_does_not_count_groups_without_a_copy_out(settings: dict[str, Any]) -> None:
    """The host tier is full, or nothing in the group is large enough to move."""
    bench = Bench(AT_ONCE, **settings)
    bench.engine._executor.leaving.largest_bytes = 1 << 19  # so that nothing is released before the backward
    chunk = bench.start(FIRST)
    delay(bench, chunk, 3)
    chunk.begin_tail()
    num_before = len(bench.leaving)
    chunk.note_launch()
    bench.save(chunk)
    num_in_tail = len(bench.leaving) - num_before
    bench.engine.start_chunk(SECOND).begin_backward()
    assert len(bench.leaving) == num_in_tail
    bench.engine.reset_iteration()


# ---- how far ahead groups come back ----


def begin_backward_of_layers(
    bench: Bench, names: str, tail_index: int, block_input: torch.Tensor | None
) -> ChunkOffloadHandler:
    """Run the forward of layers whose groups have these names, and begin the backward of the last group."""
    chunk = bench.start(FIRST)
    for layer, name in [(layer, name) for layer in range(4) for name in names.split()]:
        if len(chunk.groups) == tail_index:
            chunk.begin_tail(block_input)
        bench.save(chunk, name, GroupTraits(layer=layer))
    chunk.end_forward()
    release_all(bench.engine)
    assert bench.resident_groups == 0
    bench.begin_backward(chunk)
    return chunk


@pytest.mark.parametrize(("names", "tail_index"), [("a", -1), ("a", 3), ("a b", -1), ("a b", 7)])
def test_groups_come_back_a_layer_ahead(names: str, tail_index: int) -> None:
    bench = Bench(AT_ONCE, max_inflight_bytes=1 << 20)
    chunk = begin_backward_of_layers(bench, names, tail_index, None)
    # Of two names a layer, twice the largest group is a layer.
    assert bench.resident_groups == 1 + len(names.split())
    bench.backward(chunk)
    assert bench.finish() == 1, "the last group, and no other"


def test_the_only_group_of_a_layer_comes_back_when_the_tail_is_over() -> None:
    for names, tail_index, before, after in (("a", 3, 1, 2), ("a", 2, 3, 3), ("a b", 7, 3, 3)):
        block_input = torch.ones(1, requires_grad=True)
        bench = Bench(AT_ONCE, max_inflight_bytes=1 << 20)
        chunk = begin_backward_of_layers(bench, names, tail_index, block_input)
        assert bench.resident_groups == before
        block_input.sum().backward()
        assert bench.resident_groups == after
        bench.backward(chunk)
        assert bench.finish() == 1, "the last group, and no other"


# ---- a budget of resident bytes, and as few copies as that allows ----

EIGHT = "group " * 8


def budgeted_step(bench: Bench, names: str = EIGHT) -> None:
    if not bench.engine.is_in_iteration:
        bench.engine.begin_iteration()
    bench.backward(bench.forward(None, names, ends=False))
    bench.handles.clear()
    bench.engine.end_iteration()
    assert bench.device.hazards == []


@pytest.mark.parametrize("num_groups", [2, 3, 5])
def test_the_budget_holds_and_groups_that_fit_stay_from_the_second_forward_on(num_groups: int) -> None:
    bench = Bench(None, resident_bytes=num_groups * GROUP_BYTES)
    budgeted_step(bench)
    stats = bench.engine.stats
    assert bench.meter.peak_bytes == num_groups * GROUP_BYTES
    assert bench.num_copied_out == 8 and stats.prefetch_misses == 0
    # Those that fit when the backward begins are recalled; one place was free for a next group.
    assert stats.copied_in_bytes == (8 - (num_groups - 1)) * GROUP_BYTES
    budgeted_step(bench)
    stats = bench.engine.stats
    assert stats.copied_out_bytes == stats.copied_in_bytes == (8 - (num_groups - 1)) * GROUP_BYTES
    assert bench.meter.peak_bytes == num_groups * GROUP_BYTES


class PinningDevice(AdversarialDevice):
    """Takes so long to issue a copy-out, as where host memory has to be pinned, that all earlier copies complete."""

    def copy_out(self, stream: Any, copies: Sequence[tuple[torch.Tensor, Any]]) -> Any:
        self.synchronize_all()
        return super().copy_out(stream, copies)


def test_after_a_reset_there_is_no_tail() -> None:
    bench = Bench(horizon_bytes=0)
    bench.engine._executor.leaving.largest_bytes = 1 << 20  # so that nothing is released before the backward
    bench.forward(FIRST, num_in_tail=0)
    bench.handles.clear()
    bench.engine.reset_iteration()
    assert bench.engine.snapshot().inflight_bytes == 0
    bench.engine.begin_iteration(bench.actions)
    bench.forward(FIRST)
    bench.forward(SECOND).begin_backward()
    assert bench.resident_groups == 2 * NUM_GROUPS
    bench.finish()


def test_groups_of_the_chunk_itself_stay_for_its_backward() -> None:
    bench = Bench()
    bench.forward(FIRST)
    second = bench.forward(SECOND)
    bench.begin_backward(second)
    copied_in = bench.engine.stats.copied_in_bytes
    for index in (NUM_GROUPS - 1, NUM_GROUPS - 2):
        second.tensor_pop(bench.handles[second][index])
    assert bench.engine.stats.copied_in_bytes == copied_in  # the last two were recalled
    bench.finish()


def test_copies_that_complete_while_the_next_one_is_issued_are_released_behind_it() -> None:
    bench = Bench(device=PinningDevice)
    chunk = bench.start(FIRST)
    for _ in range(3):
        bench.save(chunk)
        assert bench.resident_groups == 1, "only the last one may still be leaving"
    bench.finish()


@pytest.mark.parametrize(("ends", "misses"), [(True, 0), (False, 1)])
def test_the_last_forward_of_a_step_ends_too(ends: bool, misses: int) -> None:
    """Else the first group of that chunk, and of those behind it, would be late: no other forward says it is over."""
    bench = Bench(max_inflight_bytes=0)
    first, second = bench.forward(FIRST, "qkv qkv"), bench.forward(SECOND, "qkv qkv", ends=ends)
    bench.backward(first)
    bench.backward(second)
    assert bench.finish() == misses


@pytest.mark.parametrize(
    "come_to",
    [
        lambda bench, chunk: chunk.end_forward(),
        lambda bench, chunk: bench.engine.start_chunk(SECOND),
        lambda bench, chunk: chunk.on_group_commit_backward(chunk.groups[0]),
    ],
    ids=["the end of the forward", "the next forward", "a backward"],
)
def test_they_wait_no_longer_than_to(come_to: Callable[[Bench, ChunkOffloadHandler], object]) -> None:
    bench = Bench(AT_ONCE, max_inflight_bytes=1 << 20)
    chunk = bench.start(FIRST)
    delay(bench, chunk)
    assert bench.num_copied_out == 0
    come_to(bench, chunk)
    assert bench.num_copied_out == 1
    bench.engine.reset_iteration()


@pytest.mark.parametrize("limit", [0, 6])
def test_at_most_half_of_the_limit_in_flight_is_delayed(limit: int) -> None:
    """One more, and all are issued; they fit, so compute need not wait for copies that have just begun."""
    bench = Bench(AT_ONCE, max_inflight_bytes=limit * GROUP_BYTES)
    chunk = bench.start(FIRST)
    delay(bench, chunk, limit // 2)
    assert bench.num_copied_out == 0
    delay(bench, chunk)
    assert bench.num_copied_out == limit // 2 + 1
    assert bench.engine.snapshot().inflight_bytes == (limit // 2 + 1) * GROUP_BYTES * (limit > 0)
    bench.backward(chunk)
    bench.finish()


@pytest.mark.parametrize("settings", [{"horizon_groups": 3}, {"resident_bytes": GROUP_BYTES}])
def test_nothing_waits_where_resident_groups_or_bytes_are_counted(settings: dict[str, Any]) -> None:
    bench = Bench(AT_ONCE, **settings)
    chunk = bench.start(FIRST)
    delay(bench, chunk, 2)
    assert bench.engine.stats.num_offloaded_groups == 2
    bench.backward(chunk)
    bench.finish()


@pytest.mark.parametrize("num_groups", [1, 6, 16])
def test_the_budget_holds_where_more_or_less_is_saved_than_expected(num_groups: int) -> None:
    bench = Bench(None, resident_bytes=5 * GROUP_BYTES)
    budgeted_step(bench)
    budgeted_step(bench, "group " * num_groups)
    assert bench.meter.peak_bytes == 5 * GROUP_BYTES
    assert bench.engine.stats.copied_in_bytes == max(0, num_groups - 4) * GROUP_BYTES


def test_until_a_first_layer_is_over_everything_leaves_as_soon_as_it_can() -> None:
    """What a first layer kept would be spread over memory that stays reserved; from the second on there is a budget."""
    device, meter = AdversarialDevice(host_capacity=1 << 16), ResidencyMeter()
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0, policy=ResidentLayers(2)), device, meter)
    engine.begin_iteration()
    chunk, handles, resident = engine.start_chunk(), [], []
    for number in range(6):
        chunk.open_group("group", GroupTraits(layer=number // 3))
        handles.append(chunk.tensor_push(torch.zeros(GROUP_BYTES, dtype=torch.uint8)))
        chunk.close_group(ends_layer=number % 3 == 2)
        device.synchronize_all()
        resident.append(meter.current_bytes // GROUP_BYTES)
    assert resident == [1, 1, 1, 2, 3, 4]
    handles.clear()
    engine.end_iteration()
    engine.close()
