# SPDX-License-Identifier: Apache-2.0
"""Decisions of small parts alone: in a whole step another part makes up for a wrong one, at the cost of time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload_engine import ChunkKey
from offload_engine._chunk.progress import ChunkProgress
from offload_engine._policy.leaving import LeavingQueue
from offload_engine._policy.lowest_peak import GroupWindowPolicy, LowestPeakPolicy, PrefetchWindowPolicy
from offload_engine._policy.resident import ResidentBudgetPolicy, ResidentLayersPolicy
from offload_engine._policy.window import BackwardWindow
from offload_engine._saved import eligibility
from offload_engine._saved.counters import ByteCounters
from offload_engine._saved.eligibility import Eligibility
from offload_engine._saved.mover import CopyOut
from offload_engine._saved.storage import TensorGroup
from offload_engine.planning.moves import BACKWARD, CHUNK_BACKWARD, DROP, FORWARD, HEAD, ITERATION_END, TAIL
from offload_engine.schedule import Action
from tests.cpu.test_horizon import group


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


@pytest.mark.parametrize(("inflight_bytes", "must_release"), [(200, False), (201, True)])
def test_two_of_the_largest_groups_may_be_in_flight_until_a_layer_is_known(
    inflight_bytes: int, must_release: bool
) -> None:
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
    for chunk in (first, second, third):
        window.begin_forward(chunk)
    window.begin_backward(third)
    window.begin_backward(second)  # before `third` has brought its group back
    second.prefetch_index = -1
    assert window.next_chunk() is first


def test_a_wrong_prediction_forgets_the_chunks_before_it() -> None:
    first, second, third = chunks_with_a_group(3)
    window = BackwardWindow()
    window.begin_forward(first)
    window.begin_forward(second)
    window.begin_backward(second)
    assert window.begin_forward(third)
    window.begin_backward(third)
    third.prefetch_index = -1
    assert window.next_chunk() is None


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
        list(layers._commit(chunk, group(0, own_bytes=8, ends_layer=True)))
        assert layers._room.limit_bytes == 16


def test_a_forward_that_was_abandoned_says_nothing_about_the_next() -> None:
    (chunk,) = chunks_with_a_group(1)
    policy = ResidentBudgetPolicy(ByteCounters(None), LeavingQueue(), 64, expected_bytes=8)
    policy.at(FORWARD, chunk, None)
    policy.clear()
    policy.at(BACKWARD, chunk, None)
    assert policy._expected_bytes == 8


def test_all_copy_outs_are_released_at_the_end_of_an_iteration() -> None:
    left = group(0)
    policy = LowestPeakPolicy(ByteCounters(None), leaving_with(left))
    assert list(policy.at(ITERATION_END, None, None)) == [(DROP, left)]
    assert list(policy.at(HEAD, None, None)) == []


@pytest.mark.parametrize("policy_type", [PrefetchWindowPolicy, GroupWindowPolicy])
def test_a_bound_of_bytes_in_flight_replaces_the_wait_at_a_backward(policy_type: Any) -> None:
    left = group(0)
    (chunk,) = chunks_with_a_group(1)
    chunk.key = ChunkKey(0, 1)
    for max_inflight_bytes, moves in ((None, [(DROP, left)]), (64, [])):
        policy = policy_type(ByteCounters(None), leaving_with(left), 2, max_inflight_bytes)
        policy.at(TAIL, chunk, None)
        assert list(policy.at(CHUNK_BACKWARD, chunk, None)) == moves
