"""Each rule of order of `_transfers.py` by itself: a program in which nothing else keeps the numbers right.

`tools/mutation_check.py` removes the waits one at a time and expects a failure here, or in the random pipelines.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from offload_engine import ChunkOffloadHandler, OffloadConfig, OffloadEngine
from tests.adversarial import AdversarialDevice

NUMEL = 64
NBYTES = 4 * NUMEL


class Bench:
    """An engine on the adversarial device, and saved tensors pushed and popped by hand."""

    def __init__(self, seed: int | None, **settings: int) -> None:
        self.device = AdversarialDevice(seed, host_capacity=1 << 16)
        config = OffloadConfig(min_tensor_bytes=0, horizon_bytes=0, **settings)
        self.engine = OffloadEngine(config, self.device)
        self.engine.begin_iteration()
        self.chunk: ChunkOffloadHandler = self.engine.start_chunk()

    def save(self, value: float) -> object:
        """One group that saves one tensor full of `value`, made by the current stream."""
        self.chunk.open_group("group")
        handle = self.chunk.tensor_push(torch.full((NUMEL,), value))
        self.chunk.close_group()
        return handle

    def read(self, handle: object) -> torch.Tensor:
        """What a kernel of the current stream reads."""
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
        bench.engine._mover.releases.drain()
        assert bench.read(second).eq(5.0).all()
        del first, second
        bench.finish()


def test_rule_3_a_copy_out_that_nobody_waited_for(seed: int | None) -> None:
    bench = Bench(seed, max_inflight_bytes=1 << 30)
    with bench.device.observe_compute():
        handle = bench.save(3.0)
        del handle  # the graph goes while the copy-out is waiting
        bench.finish()


def test_rule_3_a_copy_in_that_nobody_used(bench: Bench) -> None:
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


def test_what_was_copied_in_does_not_move_again(bench: Bench) -> None:
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


@pytest.mark.parametrize("pending", ["copy-out", "copy-in"])
def test_a_reset_waits_for_what_is_in_flight(seed: int | None, pending: str) -> None:
    bench = Bench(seed, max_inflight_bytes=0 if pending == "copy-in" else 1 << 30)
    with bench.device.observe_compute():
        handle = bench.save(3.0)
        if pending == "copy-in":
            bench.chunk.bulk_reload_group(0)
        bench.engine.reset_iteration()
        del handle
        bench.engine.close()
    assert bench.device.hazards == [] and bench.device.host_bytes == 0
