# SPDX-License-Identifier: Apache-2.0
"""`OffloadConfig.resident_bytes`: at most so many saved bytes on the device, and as few copies as that allows."""

from __future__ import annotations

import pytest
import torch

from offload_engine import (
    ChunkOffloadHandler,
    GroupTraits,
    OffloadConfig,
    OffloadEngine,
    ResidencyMeter,
    ResidentLayers,
)
from tests.adversarial import AdversarialDevice

GROUP_BYTES = 256
NUM_GROUPS = 8


class Bench:
    """One chunk of equal groups; nothing is copied before it is awaited."""

    def __init__(self, **settings: int) -> None:
        self.device = AdversarialDevice(host_capacity=1 << 16)
        self.meter = ResidencyMeter()
        self.engine = OffloadEngine(OffloadConfig.from_flags(min_tensor_bytes=0, **settings), self.device, self.meter)
        self.engine.begin_iteration()

    def forward(self, num_groups: int = NUM_GROUPS) -> tuple[ChunkOffloadHandler, list[object]]:
        chunk = self.engine.start_chunk()
        return chunk, [self._save(chunk, value) for value in range(num_groups)]

    def backward(self, chunk: ChunkOffloadHandler, handles: list[object]) -> None:
        for index in reversed(range(len(handles))):
            chunk.on_group_commit_backward(chunk.groups[index])
            assert torch.equal(chunk.tensor_pop(handles.pop()), torch.full((GROUP_BYTES,), index, dtype=torch.uint8))

    def step(self, num_groups: int = NUM_GROUPS) -> None:
        if not self.engine.is_in_iteration:
            self.engine.begin_iteration()
        self.backward(*self.forward(num_groups))
        self.engine.end_iteration()
        assert self.device.hazards == []

    @staticmethod
    def _save(chunk: ChunkOffloadHandler, value: int) -> object:
        chunk.open_group("group")
        handle = chunk.tensor_push(torch.full((GROUP_BYTES,), value, dtype=torch.uint8))
        chunk.close_group()
        return handle


@pytest.mark.parametrize("num_groups", [2, 3, 5])
def test_the_budget_holds_in_forward_and_in_backward(num_groups: int) -> None:
    bench = Bench(resident_bytes=num_groups * GROUP_BYTES)
    bench.step()
    assert bench.meter.peak_bytes == num_groups * GROUP_BYTES


def test_groups_that_fit_when_the_backward_begins_are_recalled() -> None:
    bench = Bench(resident_bytes=5 * GROUP_BYTES)
    bench.step()
    stats = bench.engine.stats
    assert stats.copied_out_bytes == NUM_GROUPS * GROUP_BYTES
    assert stats.copied_in_bytes == (NUM_GROUPS - 4) * GROUP_BYTES  # the fifth place was free for a next group
    assert stats.prefetch_misses == 0


def test_groups_that_fit_stay_from_the_second_forward_on() -> None:
    bench = Bench(resident_bytes=5 * GROUP_BYTES)
    bench.step()
    bench.step()
    stats = bench.engine.stats
    assert stats.copied_out_bytes == stats.copied_in_bytes == (NUM_GROUPS - 4) * GROUP_BYTES
    assert bench.meter.peak_bytes == 5 * GROUP_BYTES


@pytest.mark.parametrize("num_groups", [1, 6, 9, 2 * NUM_GROUPS])
def test_the_budget_holds_where_more_or_less_is_saved_than_expected(num_groups: int) -> None:
    bench = Bench(resident_bytes=5 * GROUP_BYTES)
    bench.step()
    bench.step(num_groups)
    assert bench.meter.peak_bytes == 5 * GROUP_BYTES
    assert bench.engine.stats.copied_in_bytes == max(0, num_groups - 4) * GROUP_BYTES


def test_two_forwards_before_their_backwards_share_the_budget() -> None:
    bench = Bench(resident_bytes=5 * GROUP_BYTES)
    for _ in range(2):
        if not bench.engine.is_in_iteration:
            bench.engine.begin_iteration()
        first, second = bench.forward(), bench.forward()
        bench.backward(*second)
        bench.backward(*first)
        bench.engine.end_iteration()
    assert bench.device.hazards == []
    assert bench.meter.peak_bytes == 5 * GROUP_BYTES
    assert bench.engine.stats.copied_out_bytes == (2 * NUM_GROUPS - 4) * GROUP_BYTES


def test_a_completed_copy_is_released_only_where_its_room_is_needed() -> None:
    bench = Bench(resident_bytes=NUM_GROUPS * GROUP_BYTES)
    chunk, handles = bench.forward()
    bench.device.synchronize_all()
    chunk.open_group("empty")
    chunk.close_group()
    assert bench.meter.current_bytes == (NUM_GROUPS - 1) * GROUP_BYTES
    handles.clear()


def test_a_budget_below_one_group_still_runs() -> None:
    bench = Bench(resident_bytes=1)
    bench.step()
    assert bench.engine.stats.copied_in_bytes == NUM_GROUPS * GROUP_BYTES


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
