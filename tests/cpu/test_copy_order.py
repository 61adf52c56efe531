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

copies_are_late = pytest.mark.parametrize("settings", [{"max_inflight_bytes": 1 << 30}], ids=[""])
host_has_one_lease = pytest.mark.parametrize(
    "settings", [{"max_inflight_bytes": 0, "host_limit_bytes": NBYTES}], ids=[""]
)


class Bench:
    """An engine on the adversarial device, and saved tensors pushed and popped by hand."""

    def __init__(self, seed: int | None, settings: dict[str, int]) -> None:
        self.device = AdversarialDevice(seed, host_capacity=1 << 16)
        config = OffloadConfig.from_flags(min_tensor_bytes=0, horizon_bytes=0, **settings)
        self.engine = OffloadEngine(config, self.device)
        self.engine.begin_iteration()
        self.chunk: ChunkOffloadHandler = self.engine.start_chunk()

    def save(self, *tensors: torch.Tensor, is_read_once: bool = False) -> list[object]:
        """Return the handles of one group that saves these."""
        self.chunk.open_group("group", GroupTraits(read_once=is_read_once))
        handles = [self.chunk.tensor_push(tensor) for tensor in tensors]
        self.chunk.close_group()
        return handles

    def save_full(self, value: float, is_read_once: bool = False) -> object:
        """One group that saves one tensor full of `value`, made by the current stream and held by nobody else."""
        return self.save(torch.full((NUMEL,), value), is_read_once=is_read_once)[0]

    def reads(self, handle: object, value: float) -> bool:
        """Return whether a kernel of the current stream reads this value."""
        return bool((self.chunk.tensor_pop(handle) * 1).eq(value).all())

    def wait_for(self, stream: object) -> None:
        """Have the current stream wait for another one."""
        self.device.wait_event(self.device.current_stream(), self.device.record_event(stream))  # type: ignore[arg-type]


@pytest.fixture
def settings() -> dict[str, int]:
    return {"max_inflight_bytes": 0}  # every group is released as soon as it commits


@pytest.fixture(params=[None, 1, 2, 3], ids=lambda seed: f"seed={seed}")
def bench(request: pytest.FixtureRequest, settings: dict[str, int]) -> Iterator[Bench]:
    bench = Bench(request.param, settings)
    with bench.device.observe_compute():
        yield bench
        if bench.engine.is_in_iteration:
            bench.engine.end_iteration()
        bench.engine.close()
    assert bench.device.hazards == []
    assert bench.engine.pool.num_leases == 0 and bench.device.host_bytes == 0


def test_rules_1_3_4_5_out_and_in_again(bench: Bench) -> None:
    handles = {value: bench.save_full(value) for value in (3.0, 5.0, 7.0)}
    assert bench.device.num_copies == {"out": 3}
    assert all(bench.reads(handles[value], value) for value in (7.0, 5.0, 3.0))


@host_has_one_lease
def test_rule_2_a_lease_lent_again_before_its_copy_in_ran(bench: Bench) -> None:
    first = bench.save_full(3.0)
    bench.chunk.bulk_reload_group(0)  # gives the only lease there can be back, and waits for nothing
    second = bench.save_full(5.0)
    assert bench.engine.stats.num_offloaded_groups == 2
    assert bench.reads(first, 3.0) and bench.reads(second, 5.0)


@pytest.mark.parametrize("settings", [{"max_inflight_bytes": 1 << 30, "host_limit_bytes": NBYTES}], ids=[""])
def test_rule_2_a_lease_lent_again_before_its_copy_out_ran(bench: Bench) -> None:
    first = bench.save_full(3.0)
    assert bench.reads(first, 3.0)  # recalled: the bytes are still there, and its lease goes back
    second = bench.save_full(5.0)
    assert bench.engine.stats.num_offloaded_groups == 2
    release_all(bench.engine)
    assert bench.reads(second, 5.0)


@copies_are_late
def test_rule_3_copy_out_without_a_wait(bench: Bench) -> None:
    bench.save_full(3.0)  # the graph goes while the copy-out is waiting


def test_rule_3_unused_copy_in(bench: Bench) -> None:
    handle = bench.save_full(3.0)
    bench.chunk.bulk_reload_group(0)
    del handle
    again = bench.device.allocate(NBYTES, bench.device.current_stream()).zero_()  # gets the bytes of the copy-in
    bench.device.drain()
    assert again.eq(0).all()


def test_rule_5_every_stream_that_reads_waits(bench: Bench) -> None:
    handle = bench.save_full(3.0)
    bench.chunk.bulk_reload_group(0)
    assert bench.reads(handle, 3.0)
    with bench.device.compute_stream("comm"):
        assert bench.reads(handle, 3.0)


def test_rule_6_a_reader_on_another_stream_before_the_drop(bench: Bench) -> None:
    """The bytes go back to the pool of the stream that saved them, which has not waited for comm."""
    handle = bench.save_full(3.0)
    with bench.device.compute_stream("comm"):
        assert bench.reads(handle, 3.0)


def test_one_group_that_saves_on_two_streams(bench: Bench) -> None:
    """Each buffer goes back to the pool it came from."""
    bench.chunk.open_group("group")
    handles = [bench.chunk.tensor_push(torch.full((NUMEL,), 3.0))]
    with bench.device.compute_stream("comm") as comm:
        handles.append(bench.chunk.tensor_push(torch.full((NUMEL,), 5.0)))
    handles.append(bench.chunk.tensor_push(torch.full((NUMEL,), 7.0)))
    bench.wait_for(comm)
    bench.chunk.close_group()
    assert all(bench.reads(handle, value) for handle, value in zip(handles, (3.0, 5.0, 7.0), strict=True))


def test_copied_in_storage_does_not_move_again(bench: Bench) -> None:
    handle = bench.save_full(3.0)
    with bench.device.compute_stream("comm") as comm:
        assert bench.reads(handle, 3.0)
    bench.wait_for(comm)
    with bench.device.compute_stream("other"):  # knows nothing of the copy-in, nor owns the buffer
        bench.chunk.bulk_offload_group(0)
    assert bench.device.num_copies == {"out": 1, "in": 1}
    assert bench.reads(handle, 3.0)


# -- handed over to the one who reads it -------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"max_inflight_bytes": 0}, {"max_inflight_bytes": 1 << 30}], ids=["", "recalled"])
def test_storage_read_once_can_be_read_again(bench: Bench, settings: dict[str, int]) -> None:
    """The second reader waits for a copy-in of its own (5), even where the first wrote to what it had been given."""
    is_recalled = settings["max_inflight_bytes"] > 0
    handle = bench.save_full(3.0, is_read_once=True)
    for number in range(1, 4):
        given = bench.chunk.tensor_pop(handle)
        assert bench.engine.stats.copied_in_bytes == (number - is_recalled) * NBYTES
        assert given.eq(3.0).all()
        given.fill_(number)
        del given


@host_has_one_lease
def test_storage_read_once_keeps_its_lease(bench: Bench) -> None:
    first = bench.save_full(3.0, is_read_once=True)
    assert bench.reads(first, 3.0)
    second = bench.save_full(5.0)
    assert bench.engine.stats.num_offloaded_groups == 1 and bench.engine.pool.lent_bytes == NBYTES
    assert bench.reads(first, 3.0) and bench.reads(second, 5.0)


@host_has_one_lease
@pytest.mark.parametrize("num_reads", [1, 2])
def test_rule_2_a_lease_lent_again_before_the_last_copy_in_ran(bench: Bench, num_reads: int) -> None:
    """On a stream that has not waited for it, as that of the one reader has."""
    first = bench.save_full(3.0, is_read_once=True)
    values = [bench.chunk.tensor_pop(first) * 1 for _ in range(num_reads)]
    del first
    with bench.device.compute_stream("comm"):
        second = bench.save_full(5.0)
        assert bench.engine.stats.num_offloaded_groups == 2
        assert bench.reads(second, 5.0)
    assert all(value.eq(3.0).all() for value in values)


@copies_are_late
def test_rule_3_handed_over_before_its_copy_out_ran(bench: Bench) -> None:
    """The reader drops the buffer of the forward, from which the copy-out has not read yet."""
    handle = bench.save_full(3.0, is_read_once=True)
    bench.chunk.recall_groups()
    assert bench.reads(handle, 3.0)
    assert bench.engine.stats.copied_in_bytes == 0
    assert bench.reads(handle, 3.0)


@copies_are_late
def test_resident_storage_is_not_handed_over(bench: Bench) -> None:
    """The copy-out of what was recalled has failed: there would be nothing to read it from again."""
    bench.device.fail_next_copy("out")
    handle = bench.save_full(3.0, is_read_once=True)
    bench.chunk.recall_groups()
    with pytest.raises(CopyError, match="the copy-out of group 0"):
        bench.reads(handle, 3.0)
    bench.engine.reset_iteration()


def test_rule_6_storage_read_by_another_stream_is_not_handed_over(bench: Bench) -> None:
    """Its one reader would drop it without a wait for the other stream."""
    handle = bench.save_full(3.0, is_read_once=True)
    with bench.device.compute_stream("comm"):
        assert bench.reads(handle, 3.0)
    assert bench.reads(handle, 3.0)
    assert bench.device.num_copies["in"] == 1


@copies_are_late
def test_storage_that_another_stream_reads_is_not_handed_over(bench: Bench) -> None:
    main = bench.device.current_stream()
    handle = bench.save_full(3.0, is_read_once=True)
    bench.chunk.recall_groups()
    with bench.device.compute_stream("comm") as comm:
        bench.wait_for(main)
        assert bench.reads(handle, 3.0)
    assert bench.engine._store.counters.resident_bytes == NBYTES
    bench.wait_for(comm)


@copies_are_late
def test_rule_7_storage_of_another_stream_is_not_handed_over(bench: Bench) -> None:
    """That stream, whose pool gets the bytes back, would not wait for the copy-out."""
    with bench.device.compute_stream("comm") as comm:
        tensor = torch.full((NUMEL,), 3.0)
    bench.wait_for(comm)
    bench.engine.set_allocation_stream(tensor, comm)
    [handle] = bench.save(tensor, is_read_once=True)
    del tensor
    bench.chunk.recall_groups()
    assert bench.reads(handle, 3.0)
    bench.device.record_event(comm)


def test_storage_held_elsewhere_is_not_handed_over(bench: Bench) -> None:
    """It was emptied and restored in place: the bytes would stay all the same."""
    tensor = torch.full((NUMEL,), 3.0)
    [handle] = bench.save(tensor, is_read_once=True)
    bench.engine.held_elsewhere(tensor)
    assert tensor.untyped_storage().nbytes() == 0
    assert bench.reads(handle, 3.0) and bench.reads(handle, 3.0)
    assert tensor.eq(3.0).all() and bench.device.num_copies["in"] == 1


def test_storage_held_after_its_hand_over_is_checked_again(bench: Bench) -> None:
    tensor = torch.full((NUMEL,), 3.0)
    [handle] = bench.save(tensor, is_read_once=True)
    assert bench.reads(handle, 3.0)  # copied in
    view = tensor[1:]
    bench.engine.held_elsewhere(tensor)  # but not by it alone, so that it stays
    view.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        bench.reads(handle, 3.0)


def test_storage_with_two_readers_is_not_handed_over(bench: Bench) -> None:
    tensor = torch.full((NUMEL,), 3.0)
    first, second = bench.save(tensor, tensor, is_read_once=True)
    del tensor
    assert all(bench.reads(handle, 3.0) for handle in (first, second, first))
    assert bench.device.num_copies["in"] == 1


def test_a_second_reader_that_comes_late_shares_the_buffer(bench: Bench) -> None:
    """Saved again while the only handle of the first save has its copy-in under way."""
    tensor = torch.full((NUMEL,), 3.0)
    [first] = bench.save(tensor, is_read_once=True)
    bench.chunk.bulk_reload_group(0)
    [second] = bench.save(tensor)
    assert bench.reads(first, 3.0) and bench.reads(second, 3.0)
    assert bench.device.num_copies["in"] == 1
    del first
    assert bench.reads(second, 3.0)  # the last of the two, so now it is its own


@pytest.mark.parametrize("settings", [{"max_inflight_bytes": 1 << 30}, {"max_inflight_bytes": 0}], ids=["out", "in"])
@pytest.mark.parametrize("is_read_once", [False, True])
def test_reset_waits_for_copies_in_flight(bench: Bench, settings: dict[str, int], is_read_once: bool) -> None:
    handle = bench.save_full(3.0, is_read_once)
    handed_over = bench.save_full(5.0, is_read_once)
    assert bench.reads(handed_over, 5.0)
    if settings["max_inflight_bytes"] == 0:
        bench.chunk.bulk_reload_group(0)
    bench.engine.reset_iteration()
    assert bench.engine.pool.num_leases == 0
    del handle, handed_over
