# SPDX-License-Identifier: Apache-2.0
"""Storages held outside autograd: emptied in place after their copy-out, full again before backward."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from offload_engine import CopyError, OffloadConfig, OffloadEngine, ResidencyMeter
from offload_engine._saved.handles import PackedTensor
from tests.adversarial import AdversarialDevice
from tests.engine_state import release_all

NUMEL = 64
NBYTES = 4 * NUMEL


class Bench:
    """An engine, one chunk, and a model that squares one tensor in one group."""

    def __init__(self, device: AdversarialDevice | None = None, max_inflight_bytes: int = 1 << 30) -> None:
        config = OffloadConfig.from_flags(
            min_tensor_bytes=0, horizon_bytes=0, directory="none", max_inflight_bytes=max_inflight_bytes
        )
        self.meter = ResidencyMeter()
        self.engine = OffloadEngine(config, device, self.meter)
        self.engine.begin_iteration()
        self.chunk = self.engine.start_chunk()

    def square(self, x: torch.Tensor) -> torch.Tensor:
        self.chunk.open_group("square")
        with self.chunk.saved_tensors_hooks():
            out = x.square()
        self.chunk.close_group()
        return out

    def save(self, x: torch.Tensor) -> PackedTensor:
        """Save it without autograd."""
        self.chunk.open_group("group")
        handle = self.chunk.tensor_push(x)
        self.chunk.close_group()
        return handle

    def hold(self, *x: torch.Tensor, is_told_first: bool = True, num_copies: int = 0) -> None:
        """Tell of it, and release every copy-out, as a boundary does, but without a doubt."""
        if is_told_first:
            self.engine.held_elsewhere(*x, num_copies=num_copies)
        release_all(self.engine)
        if not is_told_first:
            self.engine.held_elsewhere(*x, num_copies=num_copies)

    @property
    def resident_bytes(self) -> int:
        assert self.meter.current_bytes == self.engine._store.counters.resident_bytes
        return self.meter.current_bytes

    def finish(self) -> None:
        self.engine.end_iteration()
        assert self.resident_bytes == 0
        self.engine.close()


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
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    device = AdversarialDevice(host_capacity=1 << 16) if request.param == "adversarial" else None
    yield Bench(device)
    assert device is None or device.hazards == []


told = pytest.mark.parametrize("is_told_first", [True, False], ids=["told before the release", "told after it"])


@told
def test_emptied_and_restored_in_place(bench: Bench, is_told_first: bool) -> None:
    x = make_input()
    storage = x.untyped_storage()
    out = bench.square(x)
    if is_told_first:
        bench.engine.held_elsewhere(x)
    assert storage.nbytes() == NBYTES == bench.resident_bytes  # the copy-out still reads it
    out = out + bench.square(x)  # of two groups, copied once
    bench.hold(x, is_told_first=is_told_first)
    bench.engine.held_elsewhere(x)  # once more
    assert storage.nbytes() == 0 == bench.resident_bytes
    assert x.shape == (NUMEL,) and x.is_leaf and x._version == 0
    out.sum().backward()
    assert storage.nbytes() == NBYTES and x.untyped_storage() is storage
    assert is_whole(x) and x.grad is not None and torch.equal(x.grad, 4 * x.detach())
    assert (bench.engine.stats.num_emptied_storages, bench.engine.stats.copied_in_bytes) == (1, NBYTES)
    bench.finish()
    assert is_whole(x)


@told
@pytest.mark.parametrize("kind", ["view", "alias", "graph"])
def test_any_other_view_keeps_it_whole(bench: Bench, kind: str, is_told_first: bool) -> None:
    x = make_input() * 1
    out = bench.square(x)
    if kind == "graph":  # saved by another node, with no hook in between
        other = torch.square(x.view(8, 8))
    else:
        other = x[3:5] if kind == "view" else x.detach()
    bench.hold(x, is_told_first=is_told_first)
    assert x.untyped_storage().nbytes() == NBYTES == bench.resident_bytes  # it counts as what it is
    assert other.sum() == {"view": 7, "alias": x.sum(), "graph": x.square().sum()}[kind]
    stats = bench.engine.stats
    assert (stats.num_viewed_storages, stats.num_emptied_storages) == (1, 0)
    out.sum().backward()
    assert stats.copied_in_bytes == 0
    bench.finish()


def test_named_views_and_counted_copies_do_not_keep_it(bench: Bench) -> None:
    base = make_input() * 1
    x = base.view(8, 8)
    alias, copy = x.detach(), x.detach()
    out = bench.square(x)
    bench.hold(x, alias, num_copies=1)
    assert base.untyped_storage().nbytes() == 0
    out.sum().backward()
    assert torch.equal(copy, alias) and torch.equal(alias.view(-1), make_input().detach())
    bench.finish()


@pytest.mark.parametrize("case", ["never saved", "never told of", "kept", "modified", "copied in", "too small"])
def test_held_elsewhere_ignores_tensors_that_stay(case: str) -> None:
    bench = Bench(max_inflight_bytes=0)
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


@pytest.mark.parametrize("how", ["graph dropped", "reset"])
def test_remaining_holder_reads_its_bytes_after_a_step_without_backward(bench: Bench, how: str) -> None:
    x = make_input()
    out = bench.square(x)
    bench.hold(x)
    assert x.untyped_storage().nbytes() == 0
    if how == "reset":
        bench.engine.reset_iteration()
        assert is_whole(x)
        assert bench.engine.trim_host_memory() > 0  # its slab is closed, and no longer read
        del out
        bench.engine.close()
    else:
        del out
        assert is_whole(x)
        bench.finish()


def test_a_failed_copy_out_empties_nothing() -> None:
    device = AdversarialDevice(host_capacity=1 << 16)
    bench = Bench(device)
    device.fail_next_copy("out")
    x = make_input()
    out = bench.square(x)
    with pytest.raises(CopyError, match="group 0"):
        bench.hold(x)
    bench.engine.reset_iteration()
    assert is_whole(x)
    del out
    bench.engine.close()


def test_no_memory_to_restore_is_told_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(max_inflight_bytes=0)
    x = make_input()
    out = bench.square(x)
    bench.engine.held_elsewhere(x)
    monkeypatch.setattr(bench.engine.device, "restore", mock.Mock(side_effect=torch.OutOfMemoryError("no memory")))
    bench.engine.reset_iteration()
    assert "no memory to refill" in caplog.text and x.untyped_storage().nbytes() == 0
    del out
    bench.engine.close()


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_rule_6_the_last_read_of_a_holder_comes_before_the_emptying(seed: int | None) -> None:
    device = AdversarialDevice(seed, host_capacity=1 << 16)
    bench = Bench(device, max_inflight_bytes=0)
    with device.observe_compute():
        x = torch.full((NUMEL,), 3.0)
        handle = bench.save(x)
        before = device.record_event(device.current_stream())
        with device.compute_stream("comm") as comm:
            device.wait_event(comm, before)
            assert (x * 1).eq(3).all()
            bench.engine.held_elsewhere(x)
        assert x.untyped_storage().nbytes() == 0
        assert (bench.chunk.tensor_pop(handle) * 1).eq(3).all()
        del handle
        bench.engine.end_iteration()
        bench.engine.close()
    assert device.hazards == []


@told
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_rules_3_4_5_7_of_storages_made_on_one_stream_and_saved_on_another(
    seed: int | None, is_told_first: bool
) -> None:
    device = AdversarialDevice(seed, host_capacity=1 << 16)
    bench = Bench(device)
    with device.observe_compute():
        main = device.current_stream()
        with device.compute_stream("comm") as comm:
            held = [torch.full((NUMEL,), value) for value in (3.0, 5.0)]
        device.wait_event(main, device.record_event(comm))
        handles = []
        for x in held:
            bench.engine.set_allocation_stream(x, comm)
            handles.append(bench.save(x))
            if not is_told_first:
                release_all(bench.engine)
            assert (x * 1).isfinite().all()
            bench.hold(x)
        assert [x.untyped_storage().nbytes() for x in held] == [0, 0]
        values = [float((bench.chunk.tensor_pop(handle) * 1).mean()) for handle in handles]
        assert values == [3.0, 5.0] == [float((x * 1).mean()) for x in held]
        handles.clear()
        bench.engine.end_iteration()
        bench.engine.close()
    assert device.hazards == []
