# SPDX-License-Identifier: Apache-2.0
"""Each rule of order of `_transfers.py` by itself: a program in which nothing else keeps the numbers right.

`tools/mutation_check.py` removes the waits one at a time and expects a failure here, or in the random pipelines.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from offload_engine import ChunkOffloadHandler, CopyError, GroupTraits, OffloadConfig, OffloadEngine
from tests.adversarial import AdversarialDevice
from tests.engine_state import release_all

NUMEL = 64
NBYTES = 4 * NUMEL


class Bench:
    """An engine on the adversarial device, and saved tensors pushed and popped by hand."""

    def __init__(self, seed: int | None, **settings: int) -> None:
        self.device = AdversarialDevice(seed, host_capacity=1 << 16)
        config = OffloadConfig.from_flags(min_tensor_bytes=0, horizon_bytes=0, **settings)
        self.engine = OffloadEngine(config, self.device)
        self.engine.begin_iteration()
        self.chunk: ChunkOffloadHandler = self.engine.start_chunk()

    def save(self, value: float, is_read_once: bool = False) -> object:
        """One group that saves one tensor full of `value`, made by the current stream."""
        self.chunk.open_group("group", GroupTraits(read_once=is_read_once))
        handle = self.chunk.tensor_push(torch.full((NUMEL,), value))
        self.chunk.close_group()
        return handle

    def read(self, handle: object) -> torch.Tensor:
        """Return what a kernel of the current stream reads."""
        return self.chunk.tensor_pop(handle) * 1

    def finish(self) -> None:
        self.engine.end_iteration()
        self.engine.close()
        assert self.device.hazards == []
        assert self.engine.pool.num_leases == 0 and self.device.host_bytes == 0


@pytest.fixture(params=[None, 1, 2, 3], ids=lambda seed: f"seed={seed}")
def seed(request: pytest.FixtureRequest) -> int | None:
    return request.param


@pytest.fixture
def bench(seed: int | None) -> Iterator[Bench]:
    bench = Bench(seed, max_inflight_bytes=0)  # every group is released as soon as it commits
    with bench.device.observe_compute():
        yield bench


def test_rules_1_3_4_5_out_and_in_again(bench: Bench) -> None:
    handles = [bench.save(value) for value in (3.0, 5.0, 7.0)]
    assert bench.device.num_copies == {"out": 3}
    values = [bench.read(handle) for handle in reversed(handles)]
    del handles
    assert [float(v.mean()) for v in values] == [7.0, 5.0, 3.0] and all(v.eq(v[0]).all() for v in values)
    bench.finish()


def test_rule_2_a_lease_lent_again_before_its_copy_in_ran(seed: int | None) -> None:
    bench = Bench(seed, max_inflight_bytes=0, host_limit_bytes=NBYTES)
    with bench.device.observe_compute():
        first = bench.save(3.0)
        bench.chunk.bulk_reload_group(0)  # gives the only lease there can be back, and waits for nothing
        second = bench.save(5.0)
        assert bench.engine.stats.num_offloaded_groups == 2
        assert bench.read(first).eq(3.0).all()
        assert bench.read(second).eq(5.0).all()
        del first, second
        bench.finish()


def test_rule_2_a_lease_lent_again_before_its_copy_out_ran(seed: int | None) -> None:
    bench = Bench(seed, max_inflight_bytes=1 << 30, host_limit_bytes=NBYTES)
    with bench.device.observe_compute():
        first = bench.save(3.0)
        assert bench.read(first).eq(3.0).all()  # recalled: the bytes are still there, and its lease goes back
        second = bench.save(5.0)
        assert bench.engine.stats.num_offloaded_groups == 2
        release_all(bench.engine)
        assert bench.read(second).eq(5.0).all()
        del first, second
        bench.finish()


def test_rule_3_copy_out_without_a_wait(seed: int | None) -> None:
    bench = Bench(seed, max_inflight_bytes=1 << 30)
    with bench.device.observe_compute():
        handle = bench.save(3.0)
        del handle  # the graph goes while the copy-out is waiting
        bench.finish()


def test_rule_3_unused_copy_in(bench: Bench) -> None:
    handle = bench.save(3.0)
    bench.chunk.bulk_reload_group(0)
    del handle
    again = bench.device.allocate(NBYTES, bench.device.current_stream()).zero_()  # gets the bytes of the copy-in
    bench.device.drain()
    assert again.eq(0).all()
    bench.finish()


def test_rule_5_every_stream_that_reads_waits(bench: Bench) -> None:
    handle = bench.save(3.0)
    bench.chunk.bulk_reload_group(0)
    assert bench.read(handle).eq(3.0).all()
    with bench.device.compute_stream("comm"):
        assert bench.read(handle).eq(3.0).all()
    del handle
    bench.finish()


def test_rule_6_a_reader_on_another_stream_before_the_drop(bench: Bench) -> None:
    handle = bench.save(3.0)
    with bench.device.compute_stream("comm"):
        assert bench.read(handle).eq(3.0).all()
    del handle  # the bytes go back to the pool of the stream that saved them, which has not waited for comm
    bench.finish()


def test_one_group_that_saves_on_two_streams(bench: Bench) -> None:
    main = bench.device.current_stream()
    bench.chunk.open_group("group")
    handles = [bench.chunk.tensor_push(torch.full((NUMEL,), 3.0))]
    with bench.device.compute_stream("comm") as comm:
        handles.append(bench.chunk.tensor_push(torch.full((NUMEL,), 5.0)))
    handles.append(bench.chunk.tensor_push(torch.full((NUMEL,), 7.0)))
    bench.device.wait_event(main, bench.device.record_event(comm))
    bench.chunk.close_group()  # each buffer goes back to the pool it came from
    values = [float(bench.read(handle).mean()) for handle in handles]
    handles.clear()
    assert values == [3.0, 5.0, 7.0]
    bench.finish()


def test_two_streams_save_and_read_in_turn(bench: Bench) -> None:
    handles = []
    for value in (3.0, 5.0):
        handles.append(bench.save(value))
        with bench.device.compute_stream("comm"):
            handles.append(bench.save(-value))
    values = [float(bench.read(handle).mean()) for handle in handles]
    with bench.device.compute_stream("comm"):
        values += [float(bench.read(handle).mean()) for handle in handles]
    handles.clear()
    assert values == [3.0, -3.0, 5.0, -5.0] * 2
    bench.finish()


def test_copied_in_storage_does_not_move_again(bench: Bench) -> None:
    handle = bench.save(3.0)
    with bench.device.compute_stream("comm") as comm:
        assert bench.read(handle).eq(3.0).all()
    bench.device.wait_event(bench.device.current_stream(), bench.device.record_event(comm))
    with bench.device.compute_stream("other"):  # knows nothing of the copy-in, nor owns the buffer
        bench.chunk.bulk_offload_group(0)
    assert bench.device.num_copies == {"out": 1, "in": 1}
    assert bench.read(handle).eq(3.0).all()
    del handle
    bench.finish()


# -- handed over to the one who reads it -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_recalled", [False, True])
def test_storage_read_once_can_be_read_again(seed: int | None, is_recalled: bool) -> None:
    """The second reader waits for a copy-in of its own (5), even where the first wrote to what it had been given."""
    bench = Bench(seed, max_inflight_bytes=1 << 30 if is_recalled else 0)
    with bench.device.observe_compute():
        handle = bench.save(3.0, is_read_once=True)
        for number in range(1, 4):
            given = bench.chunk.tensor_pop(handle)
            assert bench.engine.stats.copied_in_bytes == (number - is_recalled) * NBYTES
            assert given.eq(3.0).all()
            given.fill_(number)
            del given
        del handle
        bench.finish()


def test_storage_read_once_keeps_its_lease(seed: int | None) -> None:
    bench = Bench(seed, max_inflight_bytes=0, host_limit_bytes=NBYTES)
    with bench.device.observe_compute():
        first = bench.save(3.0, is_read_once=True)
        assert bench.read(first).eq(3.0).all()
        second = bench.save(5.0)
        assert bench.engine.stats.num_offloaded_groups == 1 and bench.engine.pool.lent_bytes == NBYTES
        assert bench.read(first).eq(3.0).all() and bench.read(second).eq(5.0).all()
        del first, second
        bench.finish()


@pytest.mark.parametrize("num_reads", [1, 2])
def test_rule_2_a_lease_lent_again_before_the_last_copy_in_ran(seed: int | None, num_reads: int) -> None:
    """On a stream that has not waited for it, as that of the one reader has."""
    bench = Bench(seed, max_inflight_bytes=0, host_limit_bytes=NBYTES)
    with bench.device.observe_compute():
        first = bench.save(3.0, is_read_once=True)
        values = [bench.read(first) for _ in range(num_reads)]
        del first
        with bench.device.compute_stream("comm"):
            second = bench.save(5.0)
            assert bench.engine.stats.num_offloaded_groups == 2
            assert bench.read(second).eq(5.0).all()
        assert all(value.eq(3.0).all() for value in values)
        del second
        bench.finish()


def test_rule_3_handed_over_before_its_copy_out_ran(seed: int | None) -> None:
    """The reader drops the buffer of the forward, from which the copy-out has not read yet."""
    bench = Bench(seed, max_inflight_bytes=1 << 30)
    with bench.device.observe_compute():
        handle = bench.save(3.0, is_read_once=True)
        bench.chunk.recall_groups()
        assert bench.read(handle).eq(3.0).all()
        assert bench.engine.stats.copied_in_bytes == 0
        assert bench.read(handle).eq(3.0).all()
        del handle
        bench.finish()


def test_resident_storage_is_not_handed_over(seed: int | None) -> None:
    """The copy-out of what was recalled has failed: there would be nothing to read it from again."""
    bench = Bench(seed, max_inflight_bytes=1 << 30)
    bench.device.fail_next_copy("out")
    handle = bench.save(3.0, is_read_once=True)
    bench.chunk.recall_groups()
    with pytest.raises(CopyError, match="the copy-out of group 0"):
        bench.read(handle)
    bench.engine.reset_iteration()
    del handle
    bench.engine.close()
    assert bench.device.hazards == [] and bench.device.host_bytes == 0


def test_rule_6_storage_read_by_another_stream_is_not_handed_over(bench: Bench) -> None:
    """Its one reader would drop it without a wait for the other stream."""
    handle = bench.save(3.0, is_read_once=True)
    with bench.device.compute_stream("comm"):
        assert bench.read(handle).eq(3.0).all()
    assert bench.read(handle).eq(3.0).all()
    assert bench.device.num_copies["in"] == 1
    del handle
    bench.finish()


def test_storage_that_another_stream_reads_is_not_handed_over(seed: int | None) -> None:
    bench = Bench(seed, max_inflight_bytes=1 << 30)
    with bench.device.observe_compute():
        handle = bench.save(3.0, is_read_once=True)
        bench.chunk.recall_groups()
        saved_on = bench.device.record_event(bench.device.current_stream())
        with bench.device.compute_stream("comm") as comm:
            bench.device.wait_event(comm, saved_on)
            assert bench.read(handle).eq(3.0).all()
        assert bench.engine._store.counters.resident_bytes == NBYTES
        bench.device.wait_event(bench.device.current_stream(), bench.device.record_event(comm))
        del handle
        bench.finish()


def test_rule_7_storage_of_another_stream_is_not_handed_over(seed: int | None) -> None:
    """That stream, whose pool gets the bytes back, would not wait for the copy-out."""
    bench = Bench(seed, max_inflight_bytes=1 << 30)
    with bench.device.observe_compute():
        with bench.device.compute_stream("comm") as comm:
            tensor = torch.full((NUMEL,), 3.0)
        bench.device.wait_event(bench.device.current_stream(), bench.device.record_event(comm))
        bench.engine.set_allocation_stream(tensor, comm)
        bench.chunk.open_group("group", GroupTraits(read_once=True))
        handle = bench.chunk.tensor_push(tensor)
        del tensor
        bench.chunk.close_group()
        bench.chunk.recall_groups()
        assert bench.read(handle).eq(3.0).all()
        bench.device.record_event(comm)
        del handle
        bench.finish()


def test_storage_held_elsewhere_is_not_handed_over(bench: Bench) -> None:
    """It was emptied and restored in place: the bytes would stay all the same."""
    bench.chunk.open_group("group", GroupTraits(read_once=True))
    tensor = torch.full((NUMEL,), 3.0)
    handle = bench.chunk.tensor_push(tensor)
    bench.chunk.close_group()
    bench.engine.held_elsewhere(tensor)
    assert tensor.untyped_storage().nbytes() == 0
    assert bench.read(handle).eq(3.0).all() and bench.read(handle).eq(3.0).all()
    assert tensor.eq(3.0).all() and bench.device.num_copies["in"] == 1
    del handle
    bench.finish()


def test_storage_held_after_its_hand_over_is_checked_again(bench: Bench) -> None:
    bench.chunk.open_group("group", GroupTraits(read_once=True))
    tensor = torch.full((NUMEL,), 3.0)
    handle = bench.chunk.tensor_push(tensor)
    bench.chunk.close_group()
    assert bench.read(handle).eq(3.0).all()  # copied in
    view = tensor[1:]
    bench.engine.held_elsewhere(tensor)  # but not by it alone, so that it stays
    view.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        bench.read(handle)
    del handle
    bench.finish()


def test_storage_with_two_readers_is_not_handed_over(bench: Bench) -> None:
    bench.chunk.open_group("group", GroupTraits(read_once=True))
    tensor = torch.full((NUMEL,), 3.0)
    first, second = (bench.chunk.tensor_push(tensor) for _ in range(2))
    del tensor
    bench.chunk.close_group()
    for handle in (first, second, first):
        assert bench.read(handle).eq(3.0).all()
    assert bench.device.num_copies["in"] == 1
    del handle, first, second
    bench.finish()


def test_a_second_reader_that_comes_late_shares_the_buffer(bench: Bench) -> None:
    """Saved again while the only handle of the first save has its copy-in under way."""
    bench.chunk.open_group("group", GroupTraits(read_once=True))
    tensor = torch.full((NUMEL,), 3.0)
    first = bench.chunk.tensor_push(tensor)
    bench.chunk.close_group()
    bench.chunk.bulk_reload_group(0)
    bench.chunk.open_group("group")
    second = bench.chunk.tensor_push(tensor)
    bench.chunk.close_group()
    assert bench.read(first).eq(3.0).all() and bench.read(second).eq(3.0).all()
    assert bench.device.num_copies["in"] == 1
    del first
    assert bench.read(second).eq(3.0).all()  # the last of the two, so now it is its own
    del tensor, second
    bench.finish()


@pytest.mark.parametrize("is_read_once", [False, True])
@pytest.mark.parametrize("pending", ["copy-out", "copy-in"])
def test_reset_waits_for_copies_in_flight(seed: int | None, pending: str, is_read_once: bool) -> None:
    bench = Bench(seed, max_inflight_bytes=0 if pending == "copy-in" else 1 << 30)
    with bench.device.observe_compute():
        handle = bench.save(3.0, is_read_once)
        handed_over = bench.save(5.0, is_read_once)
        assert bench.read(handed_over).eq(5.0).all()
        if pending == "copy-in":
            bench.chunk.bulk_reload_group(0)
        bench.engine.reset_iteration()
        assert bench.engine.pool.num_leases == 0
        del handle, handed_over
        bench.engine.close()
    assert bench.device.hazards == [] and bench.device.host_bytes == 0
