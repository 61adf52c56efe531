# SPDX-License-Identifier: Apache-2.0
"""When groups leave, are released and return without a plan, beside the copies that test_planner.py compares."""

from __future__ import annotations

from collections.abc import Callable
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
    """Chunks of equal groups, two a layer, and copies that complete when they are awaited or all are synchronized."""

    def __init__(self, order: str | None = TWO, **settings: Any) -> None:
        self.device = AdversarialDevice(host_capacity=1 << 16)
        self.meter = ResidencyMeter()
        make = OffloadConfig if "policy" in settings else OffloadConfig.from_flags
        self.engine = OffloadEngine(make(**{"min_tensor_bytes": 0, **settings}), self.device, self.meter)
        self.actions = None if order is None else parse_actions(order)
        self.engine.begin_iteration(self.actions)
        self.handles: dict[ChunkOffloadHandler, list[object]] = {}

    def start(self, key: ChunkKey | None = None, **options: Any) -> ChunkOffloadHandler:
        chunk = self.engine.start_chunk(key, **options)
        self.handles[chunk] = []
        return chunk

    def save(
        self, chunk: ChunkOffloadHandler, name: str = "group", traits: GroupTraits | None = None, tensor: Any = None
    ) -> None:
        """Save a tensor that has the number of its group; without one a new one."""
        handles = self.handles[chunk]
        chunk.open_group(name, traits)
        if tensor is None:
            tensor = torch.full((GROUP_BYTES,), len(handles), dtype=torch.uint8)
        handles.append(chunk.tensor_push(tensor))
        chunk.close_group()

    def forward(
        self, key: ChunkKey | None = FIRST, names: str = NAMES, num_in_tail: int = -1, ends: bool = True, **options: Any
    ) -> ChunkOffloadHandler:
        chunk, each = self.start(key, **options), names.split()
        for index, name in enumerate(each):
            self.save(chunk, name, GroupTraits(layer=index // 2))
            if index + 1 == len(each) - num_in_tail:
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

    def reset(self) -> None:
        self.handles.clear()
        self.engine.reset_iteration()
        self.engine.begin_iteration(self.actions)

    def finish(self) -> int:
        """Finish the step; return how many storages were late."""
        self.handles.clear()
        misses = self.engine.end_iteration().prefetch_misses
        self.engine.close()
        assert self.device.hazards == []
        return misses

    resident_groups = property(lambda self: self.meter.current_bytes / GROUP_BYTES)
    num_copied_out = property(lambda self: self.engine.stats.copied_out_bytes / GROUP_BYTES)

    @property
    def leaving(self) -> list[int]:
        """List the groups with a copy-out that is not released."""
        return [group.index for group in self.engine.snapshot().leaving]


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


def test_a_group_of_the_same_name_in_the_last_layer_has_not_had_the_time_of_a_layer() -> None:
    """Only the last of several places of a name stays: that the others have just been copied says nothing of it."""
    bench = Bench(AT_ONCE)
    names = "projection " * NUM_GROUPS
    bench.forward(FIRST, names, keep_groups=frozenset({NUM_GROUPS - 1}), has_head=True)
    assert bench.leaving == [NUM_GROUPS - 2]
    bench.finish()


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


def do(bench: Bench, chunk: ChunkOffloadHandler, what: str) -> ChunkOffloadHandler:
    """Take one step of a script; return the chunk that goes on."""
    if what == "reset":
        bench.reset()
        return bench.start(FIRST)
    if what == "complete":
        bench.device.synchronize_all()
    steps: dict[str, Callable[[], object]] = {
        "save": lambda: bench.save(chunk),
        "delay": lambda: bench.save(chunk, traits=DELAYED),
        **dict.fromkeys(("launch", "complete"), chunk.note_launch),
        "end": chunk.end_forward,
        "next": lambda: bench.engine.start_chunk(SECOND),
        "backward": lambda: bench.begin_backward(chunk),
    }
    steps[what]()
    return chunk


AMPLE: dict[str, Any] = {"max_inflight_bytes": 1 << 20}


@pytest.mark.parametrize(
    ("settings", "script", "copied_out"),
    [
        # Until the device has work again, but not where the link is behind.
        (
            {"max_inflight_bytes": 2 * GROUP_BYTES},
            "save delay launch launch delay complete delay",
            [1, 1, 2, 2, 3, 3, 3],
        ),
        # No longer than to the end of the forward, the next forward, a backward or an undelayed one; in order.
        (AMPLE, "delay end", [0, 1]),
        (AMPLE, "delay next", [0, 1]),
        (AMPLE, "delay backward", [0, 1]),
        (AMPLE, "delay delay save", [0, 0, 3]),
        (AMPLE, "delay reset launch delay delay save", [0, 0, 0, 0, 0, 3]),
        # At most half of the limit in flight; one more, and all are issued.
        ({"max_inflight_bytes": 0}, "delay", [1]),
        ({"max_inflight_bytes": 6 * GROUP_BYTES}, "delay delay delay delay", [0, 0, 0, 4]),
        # Not where resident groups or bytes are counted.
        ({"horizon_groups": 3}, "delay delay", [1, 2]),
        ({"resident_bytes": GROUP_BYTES}, "delay delay", [1, 2]),
    ],
)
def test_how_long_they_wait(settings: dict[str, Any], script: str, copied_out: list[int]) -> None:
    bench = Bench(AT_ONCE, **settings)
    chunk, found = bench.start(FIRST), []
    for what in script.split():
        chunk = do(bench, chunk, what)
        found.append(bench.num_copied_out)
    assert found == copied_out and bench.leaving == sorted(bench.leaving)
    if settings.get("max_inflight_bytes") == 6 * GROUP_BYTES:
        assert len(bench.leaving) == 4, "they fit: compute need not wait for copies that have just begun"
    bench.engine.reset_iteration()


def test_they_wait_for_nothing_that_came_after_their_commit() -> None:
    """Otherwise the copy would be queued behind the work that it has waited for."""
    bench = Bench(AT_ONCE)
    chunk = bench.start(FIRST)
    with bench.device.observe_compute():
        bench.save(chunk)
        bench.save(chunk, traits=DELAYED)
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
    bench = Bench(AT_ONCE, **AMPLE)
    chunk = bench.start(FIRST)
    parts = torch.zeros(2 * GROUP_BYTES, dtype=torch.uint8).unsafe_chunk(2)
    for number, traits in enumerate((DELAYED, GroupTraits())):
        bench.save(chunk, traits=traits, tensor=parts[number].fill_(number))
        assert bench.num_copied_out == 2 * 2 * number
    bench.backward(chunk)
    bench.finish()


@pytest.mark.parametrize("settings", [{}, {"host_limit_bytes": 2 * GROUP_BYTES}, {"min_tensor_bytes": 2 * GROUP_BYTES}])
def test_tail_does_not_count_groups_without_a_copy_out(settings: dict[str, Any]) -> None:
    """The host tier is full, or nothing in the group is large enough to move."""
    bench = Bench(AT_ONCE, **settings)
    bench.engine._executor.leaving.largest_bytes = 1 << 19  # so that nothing is released before the backward
    chunk = bench.start(FIRST)
    for _ in range(3):
        bench.save(chunk, traits=DELAYED)
    chunk.begin_tail()
    num_before = len(bench.leaving)
    chunk.note_launch()
    bench.save(chunk)
    num_in_tail = len(bench.leaving) - num_before
    bench.engine.start_chunk(SECOND).begin_backward()
    assert len(bench.leaving) == num_in_tail
    bench.engine.reset_iteration()


@pytest.mark.parametrize(
    ("names", "tail_index", "has_tail_end", "resident"),
    [
        # A layer ahead; of two names a layer, twice the largest group is a layer.
        *((names, index, False, [1 + len(names.split())]) for names in ("a", "a b") for index in (-1, 3)),
        ("a b", 7, False, [3]),
        # The only group of a layer comes back when the tail is over.
        ("a", 3, True, [1, 2]),
        ("a", 2, True, [3, 3]),
        ("a b", 7, True, [3, 3]),
    ],
)
@pytest.mark.parametrize("may_delay", [False, True])
def test_groups_come_back_a_layer_ahead(
    names: str, tail_index: int, has_tail_end: bool, resident: list[int], may_delay: bool
) -> None:
    """Those count that were copied out late, too."""
    bench = Bench(AT_ONCE, **AMPLE)
    chunk, block_input = bench.start(FIRST), torch.ones(1, requires_grad=True) if has_tail_end else None
    for layer, name in [(layer, name) for layer in range(4) for name in names.split()]:
        if len(chunk.groups) == tail_index:
            chunk.begin_tail(block_input)
        bench.save(chunk, name, GroupTraits(layer=layer, may_delay=may_delay))
    chunk.end_forward()
    release_all(bench.engine)
    bench.begin_backward(chunk)
    found = [bench.resident_groups]
    if block_input is not None:
        block_input.sum().backward()
        found.append(bench.resident_groups)
    assert found == resident
    bench.backward(chunk)
    assert bench.finish() == 1, "the last group, and no other"


def budgeted_step(bench: Bench, num_groups: int) -> None:
    if not bench.engine.is_in_iteration:
        bench.engine.begin_iteration()
    bench.backward(bench.forward(None, "group " * num_groups, ends=False))
    bench.handles.clear()
    bench.engine.end_iteration()
    assert bench.device.hazards == []


@pytest.mark.parametrize(("budget", "num_groups"), [(2, 8), (3, 8), (5, 8), (5, 1), (5, 6), (5, 16)])
def test_the_budget_holds_and_groups_that_fit_stay_from_the_second_forward_on(budget: int, num_groups: int) -> None:
    """Also where more or less is saved than expected."""
    bench = Bench(None, resident_bytes=budget * GROUP_BYTES)
    budgeted_step(bench, 8)
    assert bench.meter.peak_bytes == budget * GROUP_BYTES
    assert bench.num_copied_out == 8 and bench.engine.stats.prefetch_misses == 0
    # Those that fit when the backward begins are recalled; one place was free for a next group.
    assert bench.engine.stats.copied_in_bytes == (8 - (budget - 1)) * GROUP_BYTES
    budgeted_step(bench, num_groups)
    assert bench.engine.stats.copied_in_bytes == max(0, num_groups - (budget - 1)) * GROUP_BYTES
    assert num_groups != 8 or bench.engine.stats.copied_out_bytes == bench.engine.stats.copied_in_bytes
    assert bench.meter.peak_bytes == budget * GROUP_BYTES


def test_until_a_first_layer_is_over_everything_leaves_as_soon_as_it_can() -> None:
    """What a first layer kept would be spread over memory that stays reserved; from the second on there is a budget."""
    bench, resident = Bench(None, policy=ResidentLayers(2)), []
    chunk = bench.start()
    for number in range(6):
        chunk.open_group("group", GroupTraits(layer=number // 3))
        bench.handles[chunk].append(chunk.tensor_push(torch.zeros(GROUP_BYTES, dtype=torch.uint8)))
        chunk.close_group(ends_layer=number % 3 == 2)
        bench.device.synchronize_all()
        resident.append(bench.resident_groups)
    assert resident == [1, 1, 1, 2, 3, 4]
    bench.finish()


def test_after_a_reset_there_is_no_tail() -> None:
    bench = Bench(horizon_bytes=0)
    bench.engine._executor.leaving.largest_bytes = 1 << 20  # so that nothing is released before the backward
    bench.forward(FIRST, num_in_tail=0)
    bench.reset()
    assert bench.engine.snapshot().inflight_bytes == 0
    bench.forward(FIRST)
    bench.forward(SECOND).begin_backward()
    assert bench.resident_groups == 2 * NUM_GROUPS
    bench.finish()
