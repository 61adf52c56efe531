# SPDX-License-Identifier: Apache-2.0
"""Three horizons: how many bytes, how many groups on the device, how many groups ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from offload_engine import (
    ChunkKey,
    ChunkOffloadHandler,
    FixedBounds,
    GroupWindow,
    OffloadConfig,
    OffloadEngine,
    PrefetchWindow,
    ResidencyMeter,
    ResidentBudget,
    ResidentLayers,
)
from offload_engine._policy.horizon import HorizonBytes, HorizonGroups
from offload_engine._saved.counters import ByteCounters
from offload_engine._saved.storage import TensorGroup
from offload_engine.policies import PolicySettings
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

    def __init__(self, **settings: int) -> None:
        self.device = AdversarialDevice()
        config = OffloadConfig.from_flags(min_tensor_bytes=0, **settings)
        self.engine = OffloadEngine(config, self.device, ResidencyMeter())
        self.engine.begin_iteration()
        self.chunk: ChunkOffloadHandler = self.engine.start_chunk()
        self.saved: list[object] = []

    def forward(self, depth: int = DEPTH) -> None:
        """Save one tensor per group, and keep no other reference to it."""
        for i in range(depth):
            group = self.chunk.open_group("link")
            self.saved.append(self.chunk.tensor_push(torch.full((NUMEL,), float(i))))
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
    chain.forward()
    # Bytes bound the copies in flight too, at twice the largest group: more than one copy at a time would not help.
    assert chain.engine.stats.peak_resident_bytes == min(limit, 3) * GROUP_BYTES
    for index in reversed(range(DEPTH)):
        chain.begin_backward(index)
        assert chain.resident_groups == min(limit, index + 1)
        chain.end_backward(index)
    assert chain.engine.end_iteration().peak_resident_bytes == limit * GROUP_BYTES
    assert not chain.device.hazards


def test_groups_that_the_backward_passed_by_do_not_come_at_once() -> None:
    for settings, expected in (({"horizon_groups": 3}, 3), ({"horizon_bytes": 0}, DEPTH)):
        chain = Chain(max_inflight_bytes=0, **settings)
        chain.forward()
        chain.begin_backward(0)
        assert chain.resident_groups == chain.engine.stats.prefetch_misses == expected


@pytest.mark.parametrize("distance", [1, 2, 4])
def test_how_early_to_load(distance: int) -> None:
    """While a group's backward runs, so many after it are issued; what stays behind it does not count."""
    chain = Chain(prefetch_groups=distance, max_inflight_bytes=0)
    chain.forward()
    for index in reversed(range(DEPTH)):
        assert chain.begin_backward(index) == min(DEPTH, DEPTH - index + distance)  # no graph is freed


def test_horizons_differ_where_groups_do() -> None:
    """The same three small groups after a large one: bytes let two more come, groups one."""

    def issued(**settings: int) -> int:
        chain = Chain(max_inflight_bytes=0, **settings)
        for numel in (NUMEL, NUMEL, NUMEL, 4 * NUMEL):
            chain.chunk.open_group("link")
            chain.saved.append(chain.chunk.tensor_push(torch.full((numel,), float(len(chain.saved)))))
            chain.chunk.close_group()
        return chain.begin_backward(3)

    assert issued() == 4 and issued(horizon_bytes=2 * GROUP_BYTES) == 3
    assert issued(horizon_groups=2) == 2 and issued(prefetch_groups=1) == 2
    assert issued(horizon_groups=1) == 1


@pytest.mark.parametrize("make", [GroupWindow, PrefetchWindow, ResidentLayers])
def test_a_count_is_a_positive_integer(make: Callable[[Any], PolicySettings]) -> None:
    for value, error in ((0, ValueError), (-3, ValueError), (1.0, TypeError), ("2", TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"num_\w+ must be a positive number of \w+"):
            make(value)


@pytest.mark.parametrize(
    "make",
    [
        ResidentBudget,
        lambda size: FixedBounds(horizon_bytes=size),
        lambda size: FixedBounds(max_inflight_bytes=size),
        lambda size: GroupWindow(2, max_inflight_bytes=size),
        lambda size: PrefetchWindow(2, max_inflight_bytes=size),
    ],
)
def test_a_bound_in_bytes_is_checked(make: Callable[[Any], PolicySettings]) -> None:
    make(0)
    with pytest.raises(ValueError, match=r"_bytes must not be negative, got -1"):
        make(-1)
    with pytest.raises(TypeError, match=r"_bytes must be an integer number of bytes, got 1\.5"):
        make(1.5)
    with pytest.raises(ValueError, match="needs horizon_bytes or max_inflight_bytes"):
        FixedBounds()


@pytest.mark.parametrize("policy", ["lowest peak", GroupWindow, 3])
def test_a_policy_is_one_of_the_classes(policy: Any) -> None:
    with pytest.raises(TypeError, match="policy must be an object such as"):
        OffloadConfig(policy=policy)


def test_recalled_bytes_are_ahead_until_their_backward() -> None:
    horizon = HorizonBytes(ByteCounters(None), 100)
    recalled, following = group(0, recalled_bytes=60), group(1, leaving_bytes=60)
    horizon.count_issued(recalled)
    assert not horizon.has_room(following, False)
    horizon.count_reached(recalled)
    assert horizon.has_room(following, False)


def test_groups_brought_back_for_a_backward_that_did_not_come_are_not_ahead() -> None:
    horizon = HorizonGroups(1)
    horizon.count_issued(group(0, own_device_bytes=60))
    assert not horizon.has_room(group(1), False)
    horizon.count_passed()
    assert horizon.has_room(group(1), False)


def test_groups_of_a_retained_graph_do_not_stop_the_prefetch() -> None:
    chain = Chain(horizon_groups=2)
    chain.forward()
    for index in reversed(range(DEPTH)):
        chain.begin_backward(index)  # no graph is freed
    assert chain.engine.stats.prefetch_misses == 0
