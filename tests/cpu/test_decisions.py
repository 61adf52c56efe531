# SPDX-License-Identifier: Apache-2.0
"""Three horizons: how many bytes, how many groups on the device, how many ahead; and small decisions of policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from offload_engine import (
    ChunkKey,
    FixedBounds,
    GroupWindow,
    OffloadConfig,
    OffloadEngine,
    PrefetchWindow,
    ResidencyMeter,
    ResidentBudget,
    ResidentLayers,
)
from offload_engine._chunk.progress import ChunkProgress
from offload_engine._policy.horizon import HorizonBytes, HorizonGroups
from offload_engine._policy.leaving import LeavingQueue
from offload_engine._policy.lowest_peak import GroupWindowPolicy, LowestPeakPolicy, PrefetchWindowPolicy
from offload_engine._policy.resident import ResidentBudgetPolicy, ResidentLayersPolicy
from offload_engine._policy.window import BackwardWindow
from offload_engine._saved import eligibility
from offload_engine._saved.counters import ByteCounters
from offload_engine._saved.eligibility import Eligibility
from offload_engine._saved.mover import CopyOut
from offload_engine._saved.storage import TensorGroup
from offload_engine.planning.moves import BACKWARD, CHUNK_BACKWARD, DROP, FORWARD, TAIL
from offload_engine.schedule import Action
from tests.adversarial import AdversarialDevice

DEPTH, NUMEL = 8, 64
GROUP_BYTES = 4 * NUMEL


def group(index: int, **nbytes: int) -> TensorGroup:
    made = TensorGroup(ChunkKey(0, 0), index, "group")
    for name, value in nbytes.items():
        setattr(made, name, value)
    return made


class Chain:
    """A chain of functions, one group each, whose backward is run group by group from outside."""

    def __init__(self, *numels: int, **settings: int) -> None:
        """Save one tensor per group, and keep no other reference to it."""
        self.device = AdversarialDevice()
        config = OffloadConfig.from_flags(min_tensor_bytes=0, **settings)
        self.engine = OffloadEngine(config, self.device, ResidencyMeter())
        self.engine.begin_iteration()
        self.chunk = self.engine.start_chunk()
        self.saved: list[object] = []
        for i, numel in enumerate(numels or [NUMEL] * DEPTH):
            group = self.chunk.open_group("link")
            self.saved.append(self.chunk.tensor_push(torch.full((numel,), float(i))))
            assert group is self.chunk.close_group()

    def begin_backward(self, index: int) -> int:
        """Begin the backward of group `index`; return the copy-ins issued so far."""
        self.chunk.on_group_commit_backward(self.chunk.groups[index])
        assert self.chunk.tensor_pop(self.saved[index])[0] == index
        return self.device.num_copies["in"]

    def end_backward(self, index: int) -> None:
        """End the backward, and free its graph."""
        self.saved[index] = None
        self.chunk.on_group_start_backward()

    @property
    def resident_groups(self) -> int:
        """List the groups with bytes on the device."""
        assert self.engine.meter is not None
        return self.engine.meter.current_bytes // GROUP_BYTES


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_groups_on_the_device(limit: int) -> None:
    chain = Chain(horizon_groups=limit)
    # Bytes bound the copies in flight too, at twice the largest group: more than one copy at a time would not help.
    assert chain.engine.stats.peak_resident_bytes == min(limit, 3) * GROUP_BYTES
    for index in reversed(range(DEPTH)):
        chain.begin_backward(index)
        assert chain.resident_groups == min(limit, index + 1)
        chain.end_backward(index)
    assert chain.engine.end_iteration().peak_resident_bytes == limit * GROUP_BYTES
    assert not chain.device.hazards


@pytest.mark.parametrize("distance", [1, 2, 4])
def test_how_early_to_load(distance: int) -> None:
    """While a group's backward runs, so many after it are issued; what stays behind it does not count."""
    chain = Chain(prefetch_groups=distance, max_inflight_bytes=0)
    for index in reversed(range(DEPTH)):
        assert chain.begin_backward(index) == min(DEPTH, DEPTH - index + distance)  # no graph is freed


def test_groups_that_the_backward_passed_by_do_not_come_at_once() -> None:
    for settings, expected in (({"horizon_groups": 3}, 3), ({"horizon_bytes": 0}, DEPTH)):
        chain = Chain(max_inflight_bytes=0, **settings)
        chain.begin_backward(0)
        assert chain.resident_groups == chain.engine.stats.prefetch_misses == expected


# -- what is counted as ahead -----------------------------------------------------------------------------------------


def test_recalled_bytes_are_ahead_until_their_backward() -> None:
    horizon, waiting = HorizonBytes(ByteCounters(None), 100), group(1, leaving_bytes=60)
    for count in (horizon.count_reached, lambda _: horizon.count_passed()):  # or another backward came instead
        recalled = group(0, recalled_bytes=60)
        horizon.count_issued(recalled)
        assert not horizon.has_room(waiting, False)
        count(recalled)
        assert horizon.has_room(waiting, False)


def test_groups_passed_by_count_again_once_their_backward_comes() -> None:
    counters = ByteCounters(None)
    horizon = HorizonBytes(counters, 8)
    passed, other = group(0, arriving_bytes=8), group(1, arriving_bytes=8)
    for one in (passed, other):
        one.storages = {object(): None}  # type: ignore[dict-item]
        horizon.count_issued(one)
    horizon.count_passed()
    counters.prefetched_bytes = 16
    waiting = group(2, on_host_bytes=8)
    assert horizon.has_room(waiting, False)
    horizon.count_reached(passed)
    assert not horizon.has_room(waiting, False)  # 8 are ahead: those of `other` are still left out
    counters.prefetched_bytes = 8
    assert horizon.has_room(waiting, False)
    other.storages = {}
    horizon.count_reached(passed)
    assert not horizon.has_room(waiting, False)


def test_groups_ahead_count_while_they_have_device_bytes_and_until_their_backward_or_the_end_of_the_iteration() -> None:
    horizon = HorizonGroups(1)
    ahead = group(0, own_device_bytes=8)
    for forget in (horizon.clear, horizon.count_passed):
        horizon.count_issued(ahead)
        assert not horizon.has_room(group(1), False)
        forget()
        assert horizon.has_room(group(1), False)
    horizon.count_issued(ahead)
    ahead.own_device_bytes = 0
    assert horizon.has_room(group(1), False)


# -- other decisions: in a whole step another part makes up for a wrong one, at the cost of time ----------------------


def test_bounds_that_are_refused() -> None:
    for count in (GroupWindow, PrefetchWindow, ResidentLayers):
        for value, error in ((0, ValueError), (1.0, TypeError), ("2", TypeError), (True, TypeError)):
            with pytest.raises(error, match=r"num_\w+ must be a positive number of \w+"):
                count(value)  # type: ignore[arg-type]
    makes: list[Callable[[Any], Any]] = [
        ResidentBudget,
        *(lambda size, name=name: FixedBounds(**{name: size}) for name in ("horizon_bytes", "max_inflight_bytes")),
        *(lambda size, kind=kind: kind(2, max_inflight_bytes=size) for kind in (GroupWindow, PrefetchWindow)),
    ]
    for make in makes:
        make(0)
        for value, told in ((-1, "not be negative, got -1"), (1.5, "be an integer number of bytes, got 1.5")):
            with pytest.raises((ValueError, TypeError), match=f"_bytes must {told}"):
                make(value)
    with pytest.raises(ValueError, match="needs horizon_bytes or max_inflight_bytes"):
        FixedBounds()


def chunks_with_a_group(count: int) -> list[ChunkProgress]:
    chunks = [ChunkProgress(ChunkKey(0, microbatch)) for microbatch in range(count)]
    for chunk in chunks:
        chunk.groups.append(TensorGroup(chunk.key, 0, "group"))
    return chunks


def leaving_with(*groups: TensorGroup) -> LeavingQueue:
    leaving = LeavingQueue()
    for one in groups:
        leaving.push(CopyOut(one, [], 8, None))
    return leaving


def test_the_search_for_freed_excluded_tensors_comes_at_doubled_intervals() -> None:
    found = Eligibility(torch.device("cpu"), 0)
    tensors = [torch.empty(1) for _ in range(eligibility._MIN_PRUNED)]
    for tensor in tensors:
        found.exclude(tensor)
    assert found._prune_at == 2 * len(tensors)
    del tensor, tensors[:]
    for _ in range(eligibility._MIN_PRUNED):
        found.exclude(torch.empty(1))
    assert len(found._excluded) <= 1, "all others are freed"


@pytest.mark.parametrize(("inflight_bytes", "must_release"), [(200, False), (201, True)])
def test_two_of_the_largest_groups_may_be_in_flight_at_first(inflight_bytes: int, must_release: bool) -> None:
    leaving = LeavingQueue()
    leaving.largest_bytes, leaving.inflight_bytes = 100, inflight_bytes
    assert ResidentLayersPolicy(ByteCounters(None), leaving, 2).must_release() == must_release


@pytest.mark.parametrize("forgets", ["clear", "begin", "a reset with a budget"])
def test_chunks_of_the_last_iteration_are_forgotten(forgets: str) -> None:
    policy = ResidentBudgetPolicy(ByteCounters(None), LeavingQueue(), 100)
    window = policy._window
    window.begin((), False)
    window.begin_forward(chunks_with_a_group(1)[0])
    assert window._chunks
    if forgets == "begin":
        window.begin((), False)
    else:
        (window if forgets == "clear" else policy).clear()
    assert not window._chunks


def test_chunks_whose_backward_has_begun_are_not_predicted_again() -> None:
    first, second, third = chunks_with_a_group(3)
    window = BackwardWindow()
    for chunk in (second, first, second, third):  # a key is used again before its backward
        window.begin_forward(chunk)
    window.begin_backward(third)
    assert window._window == [third, second, first]
    window.begin_backward(second)  # before `third` has brought its group back
    second.prefetch_index = -1
    assert window.next_chunk() is first


def test_a_wrong_prediction_forgets_the_chunks_before_it() -> None:
    """And what has come for them counts no more; of a chunk that is only predicted, one group comes."""
    first, second, third = chunks_with_a_group(3)
    first.groups.append(group(1))
    policy = PrefetchWindowPolicy(ByteCounters(None), LeavingQueue(), 1, None)
    window = policy._window
    window.begin_forward(first)
    window.begin_forward(second)
    window.begin_backward(second)
    for first.prefetch_index in (0, 1):
        assert policy._may_come(first, first.groups[first.prefetch_index]) == first.prefetch_index
    policy._horizon.count_issued(group(0, own_device_bytes=8))
    list(policy.at(FORWARD, third, None))
    window.begin_backward(third)
    third.prefetch_index = -1
    assert window.next_chunk() is None and policy._horizon.has_room(group(1), False)


def test_an_iteration_begins_without_groups_ahead_and_with_its_schedule() -> None:
    (chunk,) = chunks_with_a_group(1)
    policy = PrefetchWindowPolicy(ByteCounters(None), LeavingQueue(), 1, None)
    policy._horizon.count_issued(group(0, own_device_bytes=8))
    assert not policy._horizon.has_room(group(1), False)
    policy.begin((), False)
    assert policy._horizon.has_room(group(1), False)
    layers = ResidentLayersPolicy(ByteCounters(None), LeavingQueue(), 2)
    for _ in range(2):  # iterations of one layer, which is the same in each
        layers.begin((Action("F", chunk.key), Action("B", chunk.key)), False)
        assert layers._window.has_schedule
        list(layers._commit(chunk, group(0, own_bytes=8, foreign_bytes=3, ends_layer=True)))
        assert layers._room.limit_bytes == 16 + 3, "what it shares with the layer before is there, too"


def test_a_forward_that_was_abandoned_says_nothing_about_the_next() -> None:
    (chunk,) = chunks_with_a_group(1)
    policy = ResidentBudgetPolicy(ByteCounters(None), LeavingQueue(), 64, expected_bytes=8)
    policy.at(FORWARD, chunk, None)
    policy._within_budget.append(group(0))
    policy.clear()
    assert not policy._within_budget
    policy.at(BACKWARD, chunk, None)
    assert policy._expected_bytes == 8
    horizon = HorizonBytes(ByteCounters(None), None)
    delaying = LowestPeakPolicy(ByteCounters(None), LeavingQueue(), horizon)
    delaying._delayed.append(group(0))
    horizon.count_issued(group(1))
    delaying.clear()
    assert not delaying._delayed and not horizon._recalled


@pytest.mark.parametrize("policy_type", [PrefetchWindowPolicy, GroupWindowPolicy])
def test_a_bound_of_bytes_in_flight_replaces_the_wait_at_a_backward(policy_type: Any) -> None:
    left = group(0)
    (chunk,) = chunks_with_a_group(1)
    chunk.key = ChunkKey(0, 1)
    for max_inflight_bytes, moves in ((None, [(DROP, left)]), (64, [])):
        policy = policy_type(ByteCounters(None), leaving_with(left), 2, max_inflight_bytes)
        policy.at(TAIL, chunk, None)
        assert list(policy.at(CHUNK_BACKWARD, chunk, None)) == moves
