# SPDX-License-Identifier: Apache-2.0
"""Releases of copied-out bytes where a backward follows a forward, by the count of resident bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from offload_engine import (
    Action,
    ChunkKey,
    ChunkOffloadHandler,
    GroupTraits,
    OffloadConfig,
    OffloadEngine,
    ResidencyMeter,
)
from tests.adversarial import AdversarialDevice

GROUP_BYTES = 256
NUM_GROUPS, PARTS_PER_LAYER = 6, 2
FIRST, SECOND = ChunkKey(0, 0), ChunkKey(0, 1)
ORDER = [Action(kind, key) for kind, key in (("F", FIRST), ("F", SECOND), ("B", FIRST), ("B", SECOND))]


class Bench:
    """Two chunks, and copies that complete when they are awaited or `device.synchronize_all()` is called."""

    def __init__(self, order: list[Action] = ORDER, **settings: int) -> None:
        self.device = AdversarialDevice(host_capacity=1 << 16)
        self.meter = ResidencyMeter()
        self.engine = OffloadEngine(OffloadConfig.from_flags(min_tensor_bytes=0, **settings), self.device, self.meter)
        self.engine.begin_iteration(order)
        self.handles: dict[ChunkKey, list[object]] = {}

    def forward(
        self, key: ChunkKey, num_in_tail: int | None = None, names: Sequence[str] = ("second", "first"), **options: Any
    ) -> ChunkOffloadHandler:
        chunk = self.engine.start_chunk(key, **options)
        handles = self.handles[key] = []
        for num_left in reversed(range(NUM_GROUPS)):
            handles.append(self._save(chunk, names[num_left % PARTS_PER_LAYER], -1 - num_left // PARTS_PER_LAYER))
            if num_left == num_in_tail:
                chunk.begin_tail()
                chunk.begin_tail()  # the last call counts, alone
        chunk.end_forward()
        return chunk

    def begin_backward(self, chunk: ChunkOffloadHandler) -> None:
        chunk.on_group_commit_backward(chunk.groups[-1])

    def finish(self) -> None:
        self.handles.clear()
        self.engine.end_iteration()
        self.engine.close()
        assert self.device.hazards == []

    def _save(self, chunk: ChunkOffloadHandler, name: str, layer: int) -> object:
        chunk.open_group(name, GroupTraits(layer=layer))
        handle = chunk.tensor_push(torch.ones(GROUP_BYTES, dtype=torch.uint8))
        chunk.close_group()
        return handle

    @property
    def resident_groups(self) -> float:
        return self.meter.current_bytes / GROUP_BYTES


def test_a_backward_that_begins_waits_for_no_copy_that_may_be_in_flight() -> None:
    bench = Bench()
    first = bench.forward(FIRST)
    bench.forward(SECOND)
    # not released yet, and the last layer of the backward that comes next
    assert bench.resident_groups == 2 + PARTS_PER_LAYER
    bench.begin_backward(first)
    assert bench.resident_groups == 2 + 3  # the one in use, and two ahead of it
    bench.finish()


@pytest.mark.parametrize("num_in_tail", [0, 1, 2])
def test_copy_outs_before_the_tail_are_released_where_the_next_backward_begins(num_in_tail: int) -> None:
    """What the tail copied out itself is left: these copies have just been issued."""
    bench = Bench(horizon_bytes=0)
    first = bench.forward(FIRST)
    bench.forward(SECOND, num_in_tail)
    assert bench.resident_groups == 2  # a wait any sooner would delay what the next stage of the pipeline gets
    first.begin_backward()
    assert bench.resident_groups == num_in_tail
    first.begin_backward()
    bench.begin_backward(first)
    assert bench.resident_groups == num_in_tail + 1  # the one in use
    bench.finish()


def test_a_tail_ends_with_its_forward() -> None:
    bench = Bench(horizon_bytes=0)
    first = bench.forward(FIRST, num_in_tail=0)
    bench.forward(SECOND)
    first.begin_backward()
    assert bench.resident_groups == 2
    bench.finish()


def test_groups_before_the_tail_stay_for_the_backward_of_their_own_chunk() -> None:
    bench = Bench(horizon_bytes=0)
    bench.forward(FIRST)
    second = bench.forward(SECOND, num_in_tail=0)
    second.begin_backward()
    assert bench.resident_groups == 2
    bench.finish()


def test_under_a_budget_nothing_is_released_for_a_tail() -> None:
    # The second backward comes first: what the first chunk has in flight is not recalled for its own.
    bench = Bench([*ORDER[:2], *reversed(ORDER[2:])], resident_bytes=4 * NUM_GROUPS * GROUP_BYTES)
    bench.forward(FIRST)
    second = bench.forward(SECOND, num_in_tail=0)
    second.begin_backward()
    assert bench.resident_groups == 2 * NUM_GROUPS
    bench.finish()


def test_explicit_limit_in_flight_alone_decides() -> None:
    bench = Bench(horizon_bytes=0, max_inflight_bytes=4 * GROUP_BYTES)
    first = bench.forward(FIRST)
    second = bench.forward(SECOND, num_in_tail=0)
    assert bench.resident_groups == 4
    first.begin_backward()
    bench.begin_backward(first)
    assert bench.resident_groups == 4 + 1  # the one in use
    second.end_forward()
    bench.finish()


def test_after_a_reset_there_is_no_tail() -> None:
    bench = Bench(horizon_bytes=0)
    bench.engine._executor.leaving.largest_bytes = 1 << 20  # so that nothing is released before the backward
    bench.forward(FIRST, num_in_tail=0)
    bench.handles.clear()
    bench.engine.reset_iteration()
    bench.engine.begin_iteration(ORDER)
    bench.forward(FIRST)
    second = bench.forward(SECOND)
    second.begin_backward()
    assert bench.resident_groups == 2 * NUM_GROUPS
    bench.finish()


def test_group_that_is_not_released_counts_as_ahead_of_the_next_backward() -> None:
    bench = Bench(horizon_bytes=2 * GROUP_BYTES)
    first = bench.forward(FIRST)
    bench.forward(SECOND)
    assert (
        bench.engine.stats.copied_in_bytes == 0
    )  # the last two of the first chunk had not left: they fill the horizon
    for index in (NUM_GROUPS - 1, NUM_GROUPS - 2):
        first.tensor_pop(bench.handles[FIRST][index])
    assert bench.engine.stats.copied_in_bytes == 0
    bench.finish()


def test_limit_that_is_not_reached_causes_no_wait() -> None:
    bench = Bench(horizon_bytes=0)
    bench.engine._executor.leaving.largest_bytes = 2 * NUM_GROUPS * GROUP_BYTES
    first = bench.forward(FIRST)
    bench.forward(SECOND)
    bench.begin_backward(first)
    assert bench.resident_groups == 2 * NUM_GROUPS
    assert bench.engine.stats.copied_in_bytes == 0
    bench.finish()


def test_groups_of_the_chunk_itself_stay_for_its_backward() -> None:
    bench = Bench()
    bench.forward(FIRST)
    second = bench.forward(SECOND)
    bench.begin_backward(second)
    copied_in = bench.engine.stats.copied_in_bytes
    for index in (NUM_GROUPS - 1, NUM_GROUPS - 2):
        second.tensor_pop(bench.handles[SECOND][index])
    assert bench.engine.stats.copied_in_bytes == copied_in  # the last two were recalled
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


# ---- the head: logits and loss, behind the last layer of a chunk whose backward comes at once ----

AT_ONCE = [Action(kind, key) for key in (FIRST, SECOND) for kind in "FB"]
KEPT = frozenset({NUM_GROUPS - 2, NUM_GROUPS - 1})


def test_copies_of_the_layer_before_the_last_may_be_in_flight_until_the_head_begins() -> None:
    """Released where the last layer begins, they would leave the link without work while it runs.

    What has had the time of a whole layer is: the first part of the layer before, and anything older.
    """
    bench = Bench(AT_ONCE)
    chunk = bench.forward(FIRST, keep_groups=KEPT, has_head=True)
    assert bench.resident_groups == len(KEPT) + 1
    chunk.begin_head()
    assert bench.resident_groups == len(KEPT)
    bench.finish()


def test_a_group_of_the_same_name_in_the_last_layer_has_not_had_the_time_of_a_layer() -> None:
    """Only the last of several places of a name stays: that the others have just been copied says nothing of it."""
    bench = Bench(AT_ONCE)
    bench.forward(FIRST, keep_groups=frozenset({NUM_GROUPS - 1}), has_head=True, names=("projection", "projection"))
    in_flight = [group.index for group in bench.engine.snapshot().leaving]
    assert in_flight == [NUM_GROUPS - 2]
    bench.finish()


def test_without_a_head_they_leave_before_the_first_group_that_stays() -> None:
    bench = Bench(AT_ONCE)
    bench.forward(FIRST, keep_groups=KEPT)
    assert bench.resident_groups == len(KEPT)
    bench.finish()


def test_the_head_of_a_chunk_whose_backward_comes_later_waits_for_nothing() -> None:
    bench = Bench()
    chunk = bench.forward(FIRST)
    chunk.begin_head()
    assert bench.resident_groups == 2
    bench.finish()


def test_copies_are_off_the_device_for_the_loss_where_no_group_stays_either() -> None:
    """As where the last layers have none of the modules asked for."""
    bench = Bench(AT_ONCE)
    chunk = bench.forward(FIRST, has_head=True)
    assert bench.resident_groups == 2
    chunk.begin_head()
    assert bench.resident_groups == 0
    bench.finish()


def test_groups_come_back_from_the_end_of_the_loss_on() -> None:
    bench = Bench(AT_ONCE, horizon_bytes=3 * GROUP_BYTES)
    chunk = bench.forward(FIRST, keep_groups=KEPT, has_head=True)
    chunk.begin_head()
    for _ in range(2):  # once for each gradient of the logits
        chunk.end_loss()
        assert bench.resident_groups == len(KEPT) + 3
    bench.begin_backward(chunk)
    assert bench.resident_groups == len(KEPT) + 3
    bench.finish()


class PinningDevice(AdversarialDevice):
    """Takes so long to issue a copy-out, as where host memory has to be pinned, that all earlier copies complete."""

    def copy_out(self, stream: Any, copies: Sequence[tuple[torch.Tensor, Any]]) -> Any:
        self.synchronize_all()
        return super().copy_out(stream, copies)


def test_copies_that_complete_while_the_next_one_is_issued_are_released_behind_it() -> None:
    bench = Bench()
    bench.device = PinningDevice(host_capacity=1 << 16)
    bench.engine.reset_iteration()
    bench.engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0), bench.device, bench.meter)
    bench.engine.begin_iteration(ORDER)
    chunk = bench.engine.start_chunk(FIRST)
    handles = bench.handles[FIRST] = []
    for number in range(3):
        handles.append(bench._save(chunk, "first", number))
        assert bench.resident_groups == 1, "only the last one may still be leaving"
    bench.finish()
