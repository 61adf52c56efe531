# SPDX-License-Identifier: Apache-2.0
"""Each rule of order by itself, in a program in which nothing else keeps the numbers right; storages held elsewhere.

`tools/mutation_check.py` removes the waits one at a time and expects a failure here, or in the random pipelines.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from offload_engine import CopyError, GroupTraits, OffloadConfig, OffloadEngine, ResidencyMeter
from offload_engine._saved.handles import PackedTensor
from tests.adversarial import AdversarialDevice, AdversarialStream
from tests.engine_state import release_all

NUMEL = 64
NBYTES = 4 * NUMEL
LATE = 1 << 30  # bytes in flight: no copy-out is released; with none each group is as soon as it commits


def having(*each: dict[str, int]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("settings", each, ids=str)


copies_are_late = having({"max_inflight_bytes": LATE})
host_has_one_lease = having({"max_inflight_bytes": 0, "host_limit_bytes": NBYTES})


class Bench:
    """An engine with one chunk, and saved tensors pushed and popped by hand."""

    def __init__(self, device: AdversarialDevice | None, **settings: int) -> None:
        config = OffloadConfig.from_flags(min_tensor_bytes=0, horizon_bytes=0, directory="none", **settings)
        self.meter = ResidencyMeter()
        self.engine = OffloadEngine(config, device, self.meter)
        self.engine.begin_iteration()
        self.chunk = self.engine.start_chunk()

    @property
    def device(self) -> AdversarialDevice:
        assert isinstance(self.engine.device, AdversarialDevice)
        return self.engine.device

    @property
    def resident_bytes(self) -> int:
        assert self.meter.current_bytes == self.engine._store.counters.resident_bytes
        return self.meter.current_bytes

    def save(self, *tensors: torch.Tensor, is_read_once: bool = False) -> list[PackedTensor]:
        """Return the handles of one group that saves these."""
        self.chunk.open_group("group", GroupTraits(read_once=is_read_once))
        handles = [self.chunk.tensor_push(tensor) for tensor in tensors]
        self.chunk.close_group()
        return handles

    def save_full(self, value: float, is_read_once: bool = False) -> PackedTensor:
        """One group that saves one tensor full of `value`, made by the current stream and held by nothing else."""
        return self.save(torch.full((NUMEL,), value), is_read_once=is_read_once)[0]

    def reads(self, handle: PackedTensor, value: float) -> bool:
        """Return whether a kernel of the current stream reads this value."""
        return bool((self.chunk.tensor_pop(handle) * 1).eq(value).all())

    def wait_for(self, stream: AdversarialStream) -> None:
        """Have the current stream wait for another one."""
        self.device.wait_event(self.device.current_stream(), self.device.record_event(stream))

    def square(self, x: torch.Tensor) -> torch.Tensor:
        """Return the square, which one group of autograd saves."""
        self.chunk.open_group("square")
        with self.chunk.saved_tensors_hooks():
            out = x.square()
        self.chunk.close_group()
        return out

    def hold(self, *x: torch.Tensor, is_told_first: bool = True, num_copies: int = 0) -> None:
        """Tell of it, and release every copy-out, as a boundary does, but without a doubt."""
        for tell in (is_told_first, not is_told_first):
            if tell:
                self.engine.held_elsewhere(*x, num_copies=num_copies)
            else:
                release_all(self.engine)

    def finish(self) -> None:
        if self.engine.is_in_iteration:
            self.engine.end_iteration()
        assert self.resident_bytes == self.engine.pool.num_leases == 0
        self.engine.close()


@pytest.fixture
def settings() -> dict[str, int]:
    return {"max_inflight_bytes": 0}


@pytest.fixture(params=[None, 1, 2, 3], ids=lambda seed: f"seed={seed}")
def bench(request: pytest.FixtureRequest, settings: dict[str, int]) -> Iterator[Bench]:
    bench = Bench(AdversarialDevice(request.param, host_capacity=1 << 16), **settings)
    with bench.device.observe_compute():
        yield bench
        bench.finish()
    assert bench.device.hazards == [] and bench.device.host_bytes == 0


@host_has_one_lease
def test_rule_2_a_lease_lent_again_before_its_copy_in_ran(bench: Bench) -> None:
    first = bench.save_full(3.0)
    bench.chunk.bulk_reload_group(0)  # gives the only lease there can be back, and waits for nothing
    second = bench.save_full(5.0)
    assert bench.engine.stats.num_offloaded_groups == 2
    assert bench.reads(first, 3.0) and bench.reads(second, 5.0)


@having({"max_inflight_bytes": LATE, "host_limit_bytes": NBYTES})
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


@pytest.mark.parametrize("is_read_here_first", [True, False])
def test_rules_5_6_every_stream_that_reads_waits_and_is_awaited(bench: Bench, is_read_here_first: bool) -> None:
    """The bytes go back to the pool of the stream that saved them, which has not waited for comm."""
    handle = bench.save_full(3.0)
    if is_read_here_first:
        bench.chunk.bulk_reload_group(0)
        assert bench.reads(handle, 3.0)
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


# -- handed over to the one who reads it -------------------------------------------------------------------------------


@having({"max_inflight_bytes": 0}, {"max_inflight_bytes": LATE})
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


def test_storage_held_after_its_hand_over_is_checked_again(bench: Bench) -> None:
    tensor = torch.full((NUMEL,), 3.0)
    [handle] = bench.save(tensor, is_read_once=True)
    assert bench.reads(handle, 3.0)  # copied in
    view = tensor[1:]
    bench.engine.held_elsewhere(tensor)  # but not by it alone, so that it stays
    view.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        bench.reads(handle, 3.0)


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


@having({"max_inflight_bytes": LATE}, {"max_inflight_bytes": 0})
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


# -- storages held outside autograd: emptied in place after their copy-out, full again before backward ---------------


def make_input() -> torch.Tensor:
    return torch.arange(NUMEL, dtype=torch.float32).requires_grad_()


def is_whole(x: torch.Tensor) -> bool:
    return x.untyped_storage().nbytes() == NBYTES and torch.equal(x.detach(), make_input().detach())


@pytest.fixture(autouse=True)
def no_values_in_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """To show the values of an emptied tensor, as the report of a failed assertion would, ends the process."""
    monkeypatch.setattr(
        torch.Tensor, "__repr__", lambda tensor: f"<tensor of {tensor.untyped_storage().nbytes()} bytes>"
    )


@pytest.fixture(params=["cpu", "adversarial"])
def holder(request: pytest.FixtureRequest) -> Iterator[Bench]:
    device = AdversarialDevice(host_capacity=1 << 16) if request.param == "adversarial" else None
    bench = Bench(device, max_inflight_bytes=LATE)
    yield bench
    bench.finish()
    assert device is None or device.hazards == []


told = pytest.mark.parametrize("is_told_first", [True, False], ids=["told before the release", "told after it"])


@told
def test_emptied_and_restored_in_place(holder: Bench, is_told_first: bool) -> None:
    x = make_input()
    storage = x.untyped_storage()
    out = holder.square(x)
    if is_told_first:
        holder.engine.held_elsewhere(x)
    assert storage.nbytes() == NBYTES == holder.resident_bytes  # the copy-out still reads it
    out = out + holder.square(x)  # of two groups, copied once
    holder.hold(x, is_told_first=is_told_first)
    holder.engine.held_elsewhere(x)  # once more
    assert storage.nbytes() == 0 == holder.resident_bytes
    assert x.shape == (NUMEL,) and x.is_leaf and x._version == 0
    out.sum().backward()
    assert storage.nbytes() == NBYTES and x.untyped_storage() is storage
    assert is_whole(x) and x.grad is not None and torch.equal(x.grad, 4 * x.detach())
    assert (holder.engine.stats.num_emptied_storages, holder.engine.stats.copied_in_bytes) == (1, NBYTES)
    holder.engine.end_iteration()
    assert is_whole(x)


@told
@pytest.mark.parametrize("kind", ["view", "alias", "graph"])
def test_any_other_view_keeps_it_whole(holder: Bench, kind: str, is_told_first: bool) -> None:
    x = make_input() * 1
    out = holder.square(x)
    if kind == "graph":  # saved by another node, with no hook in between
        other = torch.square(x.view(8, 8))
    else:
        other = x[3:5] if kind == "view" else x.detach()
    holder.hold(x, is_told_first=is_told_first)
    assert x.untyped_storage().nbytes() == NBYTES == holder.resident_bytes  # it counts as what it is
    assert other.sum() == {"view": 7, "alias": x.sum(), "graph": x.square().sum()}[kind]
    stats = holder.engine.stats
    assert (stats.num_viewed_storages, stats.num_emptied_storages) == (1, 0)
    out.sum().backward()
    assert stats.copied_in_bytes == 0


def test_named_views_and_counted_copies_do_not_keep_it(holder: Bench) -> None:
    base = make_input() * 1
    x = base.view(8, 8)
    alias, copy = x.detach(), x.detach()
    out = holder.square(x)
    holder.hold(x, alias, num_copies=1)
    assert base.untyped_storage().nbytes() == 0
    out.sum().backward()
    assert torch.equal(copy, alias) and torch.equal(alias.view(-1), make_input().detach())


@pytest.mark.parametrize("case", ["never saved", "never told of", "kept", "modified", "copied in", "too small"])
def test_held_elsewhere_ignores_tensors_that_stay(case: str) -> None:
    bench = Bench(None, max_inflight_bytes=0)
    x = torch.ones(0).requires_grad_() * 1 if case == "too small" else make_input() * 1
    if case == "kept":
        bench.chunk = bench.engine.start_chunk(keep_groups=frozenset({0}))
    out = bench.square(x) if case != "never saved" else x.square()
    if case == "modified":
        x.detach().add_(1)
    if case == "copied in":
        bench.chunk.bulk_reload_group(0)
    nbytes = x.untyped_storage().nbytes()
    if case != "never told of":
        bench.engine.held_elsewhere(x)
    release_all(bench.engine)
    assert x.untyped_storage().nbytes() == nbytes and bench.engine.stats.num_emptied_storages == 0
    del out
    bench.finish()


@pytest.mark.parametrize("how", ["graph dropped", "reset", "no memory"])
def test_remaining_holder_reads_its_bytes_after_a_step_without_backward(
    holder: Bench, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    x = make_input()
    out = holder.square(x)
    holder.hold(x)
    assert x.untyped_storage().nbytes() == 0
    if how == "reset":
        holder.engine.reset_iteration()
        assert holder.engine.trim_host_memory() > 0  # its slab is closed, and no longer read
    elif how == "no memory":  # that is told, and stops nothing
        with mock.patch.object(holder.engine.device, "restore", side_effect=torch.OutOfMemoryError("no memory")):
            holder.engine.reset_iteration()
        assert "no memory to refill" in caplog.text and x.untyped_storage().nbytes() == 0
    del out
    assert how == "no memory" or is_whole(x)


def test_rule_6_the_last_read_of_a_holder_comes_before_the_emptying(bench: Bench) -> None:
    x, main = torch.full((NUMEL,), 3.0), bench.device.current_stream()
    [handle] = bench.save(x)
    with bench.device.compute_stream("comm"):
        bench.wait_for(main)
        assert (x * 1).eq(3).all()
        bench.engine.held_elsewhere(x)
    assert x.untyped_storage().nbytes() == 0
    assert bench.reads(handle, 3.0)


@told
@copies_are_late
def test_rules_3_4_5_7_of_storages_made_on_one_stream_and_saved_on_another(bench: Bench, is_told_first: bool) -> None:
    with bench.device.compute_stream("comm") as comm:
        held = [torch.full((NUMEL,), value) for value in (3.0, 5.0)]
    bench.wait_for(comm)
    handles = []
    for x in held:
        bench.engine.set_allocation_stream(x, comm)
        handles += bench.save(x)
        if not is_told_first:
            release_all(bench.engine)
        assert (x * 1).isfinite().all()
        bench.hold(x)
    assert [x.untyped_storage().nbytes() for x in held] == [0, 0]
    values = [float((bench.chunk.tensor_pop(handle) * 1).mean()) for handle in handles]
    assert values == [3.0, 5.0] == [float((x * 1).mean()) for x in held]


@copies_are_late
@pytest.mark.parametrize("where", ["boundary", "look"])
def test_a_failed_copy_of_a_dropped_handle_raises_afterwards(bench: Bench, where: str) -> None:
    """Its destructor cannot raise."""
    bench.device.fail_next_copy("out")
    handle = bench.save_full(3.0)
    del handle
    with pytest.raises(CopyError, match="the copy of group 0"):
        if where == "boundary":
            bench.save_full(5.0)
        else:
            bench.engine.has_saved  # noqa: B018
    bench.engine.reset_iteration()
