"""Decisions of small parts alone: in a whole step another part makes up for a wrong one, at the cost of time."""

from __future__ import annotations

import pytest
import torch

from offload_engine import ChunkKey, OffloadConfig, OffloadEngine
from offload_engine._chunk.progress import ChunkProgress
from offload_engine._policy.horizon import HorizonGroups
from offload_engine._policy.leaving import LeavingQueue
from offload_engine._policy.resident import ResidentBudgetPolicy, ResidentLayersPolicy
from offload_engine._policy.window import BackwardWindow
from offload_engine._saved import eligibility
from offload_engine._saved.counters import ByteCounters
from offload_engine._saved.eligibility import Eligibility
from offload_engine._saved.storage import TensorGroup
from offload_engine.planning.planner import Planner
from tests.adversarial import AdversarialDevice
from tests.cpu.test_host_pool import make_pool
from tests.engine_state import release_all


def group(index: int, **nbytes: int) -> TensorGroup:
    made = TensorGroup(ChunkKey(0, 0), index, "group")
    for name, value in nbytes.items():
        setattr(made, name, value)
    return made


def chunk_with_a_group() -> ChunkProgress:
    chunk = ChunkProgress(ChunkKey(0, 0))
    chunk.groups.append(group(0))
    return chunk


def test_host_bytes_returned_while_the_pool_was_busy_are_room() -> None:
    pool, _ = make_pool(limit_bytes=64)
    lease = pool.lend(64)
    assert lease is not None
    with pool._lock:  # as in the garbage collector, in the middle of an operation
        pool.give_back(lease, ())
    assert pool.room_bytes == 64


def test_no_more_idle_slabs_are_closed_than_a_lease_needs() -> None:
    pool, fake = make_pool(limit_bytes=192)
    leases = [pool.lend(64), pool.lend(64)]
    for lease in leases:
        assert lease is not None
        pool.give_back(lease, ())
    assert pool.lend(128) is not None
    assert fake.open_bytes == 192


def test_slabs_do_not_grow_beyond_their_limit() -> None:
    pool, _ = make_pool(limit_bytes=64)
    assert not pool._slabs.grow(128, 64)


def test_the_search_for_freed_excluded_tensors_comes_at_doubled_intervals() -> None:
    found = Eligibility(torch.device("cpu"), 0)
    tensors = [torch.empty(1) for _ in range(eligibility._MIN_PRUNED)]
    for tensor in tensors:
        found.exclude(tensor)
    assert found._prune_at == 2 * len(tensors)


def test_groups_ahead_count_while_they_have_device_bytes_and_until_the_end_of_the_iteration() -> None:
    horizon = HorizonGroups(1)
    ahead = group(0, own_device_bytes=8)
    horizon.count_issued(ahead)
    assert not horizon.has_room(group(1), False)
    horizon.clear()
    assert horizon.has_room(group(1), False)
    horizon.count_issued(ahead)
    ahead.own_device_bytes = 0
    assert horizon.has_room(group(1), False)


def test_one_plan_may_be_remembered() -> None:
    assert Planner(max_plans=1).plan_step((), ()) == Planner().plan_step((), ())
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Planner(max_plans=0)


@pytest.mark.parametrize(("inflight_bytes", "must_release"), [(200, False), (201, True)])
def test_two_of_the_largest_groups_may_be_in_flight_until_a_layer_is_known(
    inflight_bytes: int, must_release: bool
) -> None:
    leaving = LeavingQueue()
    leaving.largest_bytes, leaving.inflight_bytes = 100, inflight_bytes
    assert ResidentLayersPolicy(ByteCounters(None), leaving, 2).must_release() == must_release


@pytest.mark.parametrize("forgets", ["clear", "begin"])
def test_chunks_of_the_last_iteration_are_forgotten(forgets: str) -> None:
    window = BackwardWindow()
    window.begin((), False)
    window.begin_forward(chunk_with_a_group())
    assert window._chunks
    window.clear() if forgets == "clear" else window.begin((), False)
    assert not window._chunks


def test_a_budget_forgets_the_chunks_of_an_iteration_that_is_reset() -> None:
    policy = ResidentBudgetPolicy(ByteCounters(None), LeavingQueue(), 100)
    policy.begin((), False)
    policy._window.begin_forward(chunk_with_a_group())
    assert policy._window._chunks
    policy.clear()
    assert not policy._window._chunks


def test_a_tensor_that_no_copy_in_has_brought_back_is_counted_as_missed() -> None:
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0), AdversarialDevice())
    with engine.iteration():
        chunk = engine.start_chunk()
        chunk.open_group("group")
        handle = chunk.tensor_push(torch.ones(64))
        chunk.close_group()
        release_all(engine)
        assert (chunk.tensor_pop(handle) == 1).all()
        del handle
        assert engine.stats.prefetch_misses == 1
    engine.close()
