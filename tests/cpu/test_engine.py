# SPDX-License-Identifier: Apache-2.0
"""Checks the engine's promises about single tensors and groups. Orders and races: test_random_pipelines.py."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from offload_engine import (
    IS_COMPILED,
    ChunkOffloadHandler,
    FixedBounds,
    GroupTraits,
    OffloadConfig,
    OffloadEngine,
    OffloadError,
    ResidencyMeter,
)
from offload_engine._compat import torch_private
from offload_engine._compat.own_hooks import OwnHooks, pop_own
from offload_engine._devices import CpuDevice
from offload_engine._devices.memory_slab import MemorySlab
from offload_engine._saved import store
from offload_engine._saved.storage import SavedStorage, TensorGroup
from offload_engine.schedule import parse_actions
from tests.adversarial import AdversarialDevice, AdversarialStream
from tests.engine_state import CountedLock, in_group, is_free, release_all

NUMEL = 512

pytestmark = pytest.mark.usefixtures("no_hooks")


@pytest.fixture
def settings() -> dict[str, int]:
    return {}


def having(*each: dict[str, int]) -> pytest.MarkDecorator:
    """Give the test an engine with these settings."""
    return pytest.mark.parametrize("settings", each, ids=str)


@pytest.fixture
def engine(settings: dict[str, int]) -> Iterator[OffloadEngine]:
    """An engine on the adversarial device, of which nothing is left in the end."""
    engine = make_engine(**settings)
    yield engine
    check_nothing_left(engine)
    engine.close()


def make_engine(**settings: object) -> OffloadEngine:
    config = OffloadConfig.from_flags(**{"min_tensor_bytes": 0, **settings})
    return OffloadEngine(config, AdversarialDevice(), ResidencyMeter())


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*(shape or (NUMEL,)), dtype=dtype).requires_grad_()


def check_against_plain(engine: OffloadEngine, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
    """Check that gradients through one offloaded group, and one behind it, equal the plain ones bit for bit."""
    plain = torch.autograd.grad(function(*inputs).sin().sum(), inputs)
    with engine.iteration():
        chunk = engine.start_chunk()
        output = in_group(chunk, torch.sin, in_group(chunk, function, *inputs))
        in_group(chunk, torch.cos, leaf())  # its commit releases what came before
        offloaded = torch.autograd.grad(output.sum(), inputs)
        del output
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))
    assert engine.stats.copied_in_bytes > 0
    check_nothing_left(engine)


def check_nothing_left(engine: OffloadEngine) -> None:
    assert engine.stats.num_storages_left == 0 and engine.pool.num_leases == 0
    assert engine.meter is not None and engine.meter.current_bytes == 0
    assert not engine.device.hazards  # type: ignore[attr-defined]


# -- which tensors move -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_read_once", [False, True])
def test_a_storage_at_the_address_of_one_that_left_is_another(is_read_once: bool) -> None:
    """The one reader of what is read once drops the buffer of the forward; the adversarial device pins addresses."""
    policy = FixedBounds(max_inflight_bytes=1 << 30)
    engine = OffloadEngine(OffloadConfig(directory="none", min_tensor_bytes=0, policy=policy))
    with engine.iteration():
        chunk = engine.start_chunk()
        chunk.open_group("first", GroupTraits(read_once=is_read_once))
        tensor = torch.zeros(NUMEL)
        address, first = tensor.untyped_storage()._cdata, chunk.tensor_push(tensor)
        chunk.close_group()
        del tensor
        if is_read_once:
            chunk.recall_groups()
            assert chunk.tensor_pop(first).eq(0).all() and engine.stats.copied_in_bytes == 0
        else:
            release_all(engine)
        tensors = [torch.ones(NUMEL)]  # kept: the next one gets another address
        while tensors[-1].untyped_storage()._cdata != address and len(tensors) < 10_000:
            tensors.append(torch.ones(NUMEL))
        assert is_read_once == (tensors[-1].untyped_storage()._cdata != address)
        chunk.open_group("second")
        second = chunk.tensor_push(tensors[-1])
        chunk.close_group()
        assert chunk.tensor_pop(first).eq(0).all() and chunk.tensor_pop(second).eq(1).all()
        del first, second
    engine.close()


def test_a_storage_that_is_saved_outside_the_groups_too_leaves(engine: OffloadEngine) -> None:
    def function(x: torch.Tensor, in_group: Callable[..., torch.Tensor]) -> torch.Tensor:
        y = x * 1
        saved.append(StorageWeakRef(y.untyped_storage()))
        early = y.cos()
        return in_group(torch.sin, y) + early + y.view(2, -1).exp().view(-1) * y

    saved: list[StorageWeakRef] = []
    x = leaf()
    plain = torch.autograd.grad(function(x, lambda operation, y: operation(y)).sum(), x)[0]
    with engine.iteration():
        chunk = engine.start_chunk()
        with chunk.hooks.around_groups():
            output = function(x, lambda operation, y: in_group(chunk, operation, y))
            in_group(chunk, torch.sin, leaf())
            in_group(chunk, torch.sin, leaf())
        assert saved[-1].expired()
        assert engine.stats.managed_bytes == 3 * 4 * NUMEL
        offloaded = torch.autograd.grad(output.sum(), x)[0]
        del output
    assert torch.equal(plain, offloaded)


def test_weights_and_their_views_stay_also_inside_wrappers_and_gathered(engine: OffloadEngine) -> None:
    """FSDP gathers weights into storages that were unknown when the iteration began."""
    from torch.testing._internal.two_tensor import TwoTensor

    linear, parts = torch.nn.Linear(16, 16), (torch.ones(NUMEL), torch.zeros(NUMEL))
    with engine.iteration(weights=[*linear.parameters(), TwoTensor(*parts), torch.eye(4).to_sparse()]):
        chunk = engine.start_chunk()
        chunk.open_group("weights")
        for tensor in (linear.weight, linear.weight.t(), linear.weight.detach()[2:], *parts):
            assert chunk.tensor_push(tensor) is tensor
            assert chunk.tensor_pop(tensor) is tensor
        linear.weight.data = torch.ones(16, 16)
        assert torch.equal(chunk.tensor_push(view := linear.weight.t()), view)
        chunk.close_group()
    assert engine.stats.managed_bytes == 0


@having({"min_tensor_bytes": 1024})
def test_small_sparse_and_excluded_tensors_stay(engine: OffloadEngine) -> None:
    marked, excluded = torch.randn(NUMEL), torch.randn(NUMEL)
    marked._TE_do_not_offload = True  # type: ignore[attr-defined]
    small, sparse, subclass = torch.randn(10), torch.eye(64).to_sparse(), torch.nn.Parameter(torch.randn(NUMEL))
    with engine.iteration():
        engine.exclude(excluded)
        chunk = engine.start_chunk()
        for tensor in (marked, excluded, excluded.view(2, -1), small, sparse, subclass):
            assert chunk.tensor_push(tensor) is tensor
        assert chunk.tensor_push(torch.randn(NUMEL)) is not None
        assert chunk.tensor_push(torch.eye(64, requires_grad=True).to_sparse()).is_sparse
    assert engine.stats.managed_bytes == 4 * NUMEL and not engine._store.eligibility._excluded


def test_what_is_excluded_for_good_stays_in_later_iterations_and_when_it_was_emptied(engine: OffloadEngine) -> None:
    buffer = torch.ones(NUMEL)
    engine.exclude(buffer.view(2, -1), for_good=True)
    for is_torn in (False, True, False):
        with engine.iteration():
            chunk = engine.start_chunk()
            assert chunk.tensor_push(buffer) is buffer
        buffer.untyped_storage().resize_(0)
        buffer.untyped_storage().resize_(4 * NUMEL)
        if is_torn:
            engine.reset_iteration()
    del buffer
    with engine.iteration():
        assert not engine._store.eligibility._excluded


@having({"min_tensor_bytes": 1024})
def test_a_small_view_of_a_large_storage_moves_with_it(engine: OffloadEngine) -> None:
    """Were it kept as it is, it would hold the whole storage on the device."""
    check_against_plain(engine, lambda x: (y := x * 1)[:2].exp().sum() * y, leaf())


# -- when the engine is passive ---------------------------------------------------------------------------------------


def test_passive_without_gradients_outside_iterations_and_in_backward(engine: OffloadEngine) -> None:
    assert not engine.is_active
    seen: list[bool] = []

    def probe(x: torch.Tensor) -> torch.Tensor:
        seen.append(engine.is_active)
        return x.exp()

    with engine.iteration():
        assert bool(engine.is_active)
        with torch.no_grad():
            assert not engine.is_active
        checkpoint(probe, leaf(), use_reentrant=True).sum().backward()
        checkpoint(probe, leaf(), use_reentrant=False).sum().backward()
    # forward (reentrant: under no_grad), recomputation, forward, recomputation
    assert seen == [False, False, True, False]


@having({}, {"dry_run": True})
def test_kept_groups_and_a_dry_run_move_nothing(engine: OffloadEngine) -> None:
    keep = frozenset() if engine.config.dry_run else frozenset({0, 1})
    with engine.iteration():
        chunk = engine.start_chunk(keep_groups=keep)
        total = in_group(chunk, torch.exp, in_group(chunk, torch.sin, leaf())).sum()
        if engine.config.dry_run:
            chunk.bulk_offload_group(0)
        total.backward()
    assert engine.stats.copied_out_bytes == 0 and engine.stats.peak_resident_bytes == 2 * 4 * NUMEL
    assert engine.stats.num_kept_groups == len(keep)


# -- graphs that do not end in one backward ---------------------------------------------------------------------------


def test_in_place_use_of_an_output_is_legal_and_of_a_saved_tensor_is_an_error(engine: OffloadEngine) -> None:
    check_against_plain(engine, lambda x: torch.sin(x).add_(1).mul_(2), leaf())
    with engine.iteration():
        chunk = engine.start_chunk()
        output = in_group(chunk, torch.exp, leaf())  # saves its output
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (output.add_(1)).sum().backward()
        del output


@pytest.mark.parametrize("hooks", ["in_group", "around_groups"])
@pytest.mark.parametrize("reason", ["small", "excluded", "a weight"])
def test_in_place_use_of_a_saved_tensor_that_stays_is_an_error_too(hooks: str, reason: str) -> None:
    engine = make_engine(min_tensor_bytes=8 * NUMEL if reason == "small" else 0)
    x, y = leaf(), torch.ones(NUMEL)
    with engine.iteration(weights=[y] if reason == "a weight" else []):
        if reason == "excluded":
            engine.exclude(y)
        with getattr(engine.start_chunk().hooks, hooks)():
            total = (x * y).sum()
        y.add_(1)
        with pytest.raises(RuntimeError, match=r"torch.float32 of shape \(512,\), has been modified by an inplace"):
            total.backward()
        del total
    engine.close()


# -- faults -----------------------------------------------------------------------------------------------------------


def test_calls_in_the_wrong_order(engine: OffloadEngine) -> None:
    with pytest.raises(OffloadError, match="begin_iteration"):
        engine.start_chunk()
    with pytest.raises(OffloadError, match="outside an iteration"):
        engine.end_iteration()
    with pytest.raises(TypeError, match=r"Action objects, got 'F0.0'; parse_actions\(\)"):
        engine.begin_iteration([*parse_actions("B0.0"), "F0.0"])  # type: ignore[list-item]
    engine.begin_iteration()
    with pytest.raises(OffloadError, match="reset_iteration"):
        engine.begin_iteration()
    with pytest.raises(OffloadError, match="no open group"):
        engine.start_chunk().close_group()
    with pytest.raises(NotImplementedError, match="double_buffering=True is not supported"):
        engine.start_chunk(double_buffering=True)
    engine.reset_iteration()
    engine.reset_iteration()


def test_a_graph_outlives_a_closed_engine_and_nothing_starts_anew(engine: OffloadEngine) -> None:
    engine.begin_iteration()
    total = in_group(engine.start_chunk(), torch.exp, leaf()).sum()
    engine.close()
    with pytest.raises(OffloadError, match="abandoned"):
        total.backward()
    del total
    with pytest.raises(OffloadError, match="make a new engine"):
        engine.begin_iteration()


def six_groups(engine: OffloadEngine) -> torch.Tensor:
    chunk, y = engine.start_chunk(), leaf()
    for _ in range(6):
        y = in_group(chunk, torch.sin, y)
    return y.sum()


@pytest.mark.parametrize("kind", ["out", "in"])
def test_an_interrupt_behind_a_copy_frees_no_memory_under_it(kind: str, engine: OffloadEngine) -> None:
    """No event tells of that copy, and the graph goes before the reset."""
    device: Any = engine.device
    stream = getattr(engine._store.context, f"copy_{kind}_stream")
    record, interrupts = device.record_event, iter([KeyboardInterrupt])

    def record_event(of: AdversarialStream) -> object:
        for interrupt in interrupts if of == stream else ():
            raise interrupt
        return record(of)

    engine.begin_iteration()
    with mock.patch.object(device, "record_event", record_event), pytest.raises(KeyboardInterrupt):
        six_groups(engine).backward()
    gc.collect()
    engine.reset_iteration()
    assert not device.hazards
    check_against_plain(engine, lambda x: (x * 1).exp() * x, leaf())


def test_an_error_behind_a_close_is_the_one_that_comes_out(engine: OffloadEngine) -> None:
    with pytest.raises(ValueError, match="of the caller"), engine.iteration():
        engine.close()
        raise ValueError("of the caller")


class _Clears(torch.autograd.Function):
    """Frees in its backward what it has read, as TransformerEngine's modules do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        saved = x.cos()
        ctx.save_for_backward(saved)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (saved,) = ctx.saved_tensors
        result = grad * saved
        saved.data = torch.empty(0)
        return result


def test_a_backward_may_give_what_it_has_read_another_storage(engine: OffloadEngine) -> None:
    """The meter looked the bytes up by the storage that came in its place, and a training ended with that error."""
    check_against_plain(engine, _Clears.apply, leaf())
    with engine.iteration():
        chunk, values = engine.start_chunk(), torch.ones(NUMEL)
        group = chunk.open_group("group")
        handles = [chunk.tensor_push(values), chunk.tensor_push(values)]
        del values
        chunk.close_group()
        release_all(engine)
        assert group.on_host_bytes
        chunk.tensor_pop(handles[0]).data = torch.empty(0)
        assert chunk.tensor_pop(handles[1]).sum() == NUMEL, "another reader gets it all the same"
        del handles


# -- groups without room on the host, and the return of host memory ----------------------------------------------------


def sines(engine: OffloadEngine, num_groups: int) -> torch.Tensor:
    x = out = torch.ones(NUMEL, requires_grad=True)
    with engine.iteration():
        chunk = engine.start_chunk()
        for _ in range(num_groups):
            out = in_group(chunk, torch.sin, out)
        return torch.autograd.grad(out.sum(), x)[0]


def test_a_group_without_room_stays_or_is_an_error_that_states_its_size() -> None:
    expected, room = sines(make_engine(), 4), {"host_limit_bytes": 8 * NUMEL, "max_inflight_bytes": 0}
    engine, strict = make_engine(**room), make_engine(**room, host_policy="error")
    assert torch.equal(sines(engine, 4), expected)
    assert (engine.stats.num_offloaded_groups, engine.stats.num_host_limit_groups) == (2, 2)
    told = (
        r"group 2 \(group\) of chunk \(stage 0, microbatch 0\) needs 2,048 bytes of host memory, and at most 0 can be"
        r" lent at once \(the pool holds 4,096, of which 4,096 are lent\). Raise .* host_policy='keep'"
    )
    with pytest.raises(OffloadError, match=told):
        sines(strict, 4)
    assert torch.equal(sines(strict, 2), sines(make_engine(), 2))  # a smaller step is right
    for each in (engine, strict):
        check_nothing_left(each)
        each.close()


def test_host_memory_is_trimmed_on_request_and_at_the_end(engine: OffloadEngine) -> None:
    device: Any = engine.device
    sines(engine, 4)
    held = engine.pool.slab_bytes_total
    assert engine.stats.host_bytes == held
    device.synchronize_all()  # no copy reads it any more
    assert held >= 4 * 4 * NUMEL // 2 and engine.trim_host_memory() == held
    assert engine.pool.slab_bytes_total == device.host_bytes == 0
    sines(engine, 4)
    engine.close()
    assert device.host_bytes == 0


# -- hooks that pause, so that what is saved meanwhile is autograd's alone, and hooks that leave autograd's stack -----


def innermost_hooks() -> Any:
    return torch_private.innermost_hooks(True)


class SaveInOrder(torch.autograd.Function):
    """Saves some tensors in their order, and gives `x` back times their total."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return x * _total(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * _total(ctx.saved_tensors), None


def _total(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.sum() for tensor in tensors]).sum()


@pytest.mark.parametrize("is_whole", [True, False], ids=["the whole", "its parts, of which one would keep it"])
def test_hooks_pause_behind_the_whole_of_a_tensor(engine: OffloadEngine, is_whole: bool) -> None:
    """Those of all groups around pause, whatever was saved in front of it."""
    x = leaf()
    first, whole, last = (torch.rand(NUMEL) for _ in range(3))
    saved = [first, whole, last] if is_whole else [first, *whole.chunk(2), last]
    plain = torch.autograd.grad(SaveInOrder.apply(x, saved).sum(), x)[0]
    with engine.iteration():
        chunk = engine.start_chunk()
        with chunk.hooks.around_groups():
            outer = chunk.open_group("outer")
            with chunk.saved_tensors_hooks():
                inner = chunk.open_group("inner")
                with chunk.saved_tensors_hooks():
                    before = innermost_hooks()
                    assert chunk.hooks.pause_behind(whole.view(2, -1))
                    total = SaveInOrder.apply(x, saved).sum()
                    assert (innermost_hooks() is None) == is_whole
                    chunk.hooks.resume()
                    assert innermost_hooks() == before
                chunk.close_group()
            chunk.close_group()
        packed = {each.untyped_storage()._cdata for each in ((first, whole) if is_whole else (first, whole, last))}
        assert {each.key for each in inner.storages} == packed and not outer.storages
        del first, whole, last
        saved.clear()
        assert torch.equal(torch.autograd.grad(total, x)[0], plain)
        del total
    check_nothing_left(engine)


@pytest.mark.parametrize("innermost", ["none", "other hooks", "another chunk", "a pause that waits", "a group"])
def test_hooks_do_not_pause_under_others(engine: OffloadEngine, innermost: str) -> None:
    """Under a group they do, behind a tensor."""
    with engine.iteration(), contextlib.ExitStack() as stack:
        chunk = engine.start_chunk()
        contexts: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
            "other hooks": torch.autograd.graph.save_on_cpu,
            "another chunk": engine.start_chunk().hooks.around_groups,
            "a group": chunk.saved_tensors_hooks,
        }
        if innermost != "none":
            stack.enter_context(chunk.hooks.around_groups())
        if innermost in contexts:
            stack.enter_context(contexts[innermost]())
        if innermost == "a pause that waits":
            assert chunk.hooks.pause_behind(torch.rand(NUMEL))
            stack.callback(chunk.hooks.resume)
        before = innermost_hooks()
        assert not chunk.hooks.pause_around_groups()
        assert innermost == "a group" or not chunk.hooks.pause_behind(torch.rand(NUMEL))
        assert innermost_hooks() == before


# ---- hooks that leave autograd's stack by what they are ----


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def other(x: torch.Tensor) -> torch.Tensor:
    return x


def test_hooks_leave_those_of_others_alone() -> None:
    """Also where another has left its own on top, as a generator of torch's checkpoint before it is freed."""
    with OwnHooks(same, same):
        torch_private.push_hooks(other, other)
    assert innermost_hooks() == (other, other)
    torch_private.pop_hooks()
    assert innermost_hooks() is None
    with OwnHooks(other, other):
        with OwnHooks(same, same):
            pop_own(lambda unpack: unpack is same)
        assert innermost_hooks() == (other, other)
    assert innermost_hooks() is None


# -- graphs that are dropped without a backward, also in a cycle, which the collector finds in the middle of something


def test_a_step_leaves_nothing_to_the_collector(engine: OffloadEngine) -> None:
    """A storage in a cycle would keep its events, and a CUDA event is recorded again only once it is unreferenced."""
    gc.collect()  # what other tests have left
    with engine.iteration():
        six_groups(engine).backward()
        assert engine.stats.copied_in_bytes > 0
    assert not [o for o in gc.get_objects() if type(o) in (SavedStorage, TensorGroup)]


@having({}, {"min_tensor_bytes": 1 << 20})
@pytest.mark.parametrize("operation", [torch.sin, torch.exp, lambda x: torch.softmax(torch.tanh(x), -1)])
def test_a_graph_that_is_dropped_leaves_no_byte(engine: OffloadEngine, operation: Callable[..., torch.Tensor]) -> None:
    """That saves its input, its output, and both ends of a chain."""
    engine.begin_iteration()
    chunk, y = engine.start_chunk(), leaf() * 1
    saved = [StorageWeakRef(y.untyped_storage())]
    y = in_group(chunk, operation, y)
    saved.append(StorageWeakRef(y.untyped_storage()))
    del y, chunk
    engine.end_iteration()
    assert all(storage.expired() for storage in saved)
    check_nothing_left(engine)


def save_in_a_cycle(chunk: ChunkOffloadHandler, tensor: torch.Tensor) -> None:
    """Push `tensor`; only the collector can drop the handle."""
    cycle: list[Any] = [chunk.tensor_push(tensor)]
    cycle.append(cycle)


def collecting(function: Callable[..., Any]) -> Callable[..., Any]:
    def collect_first(*args: Any) -> Any:
        gc.collect()
        return function(*args)

    return collect_first


@having({"max_inflight_bytes": 1 << 30})
@pytest.mark.parametrize("step", ["pack", "copy-out", "release", "copy-in"])
def test_collected_in_the_middle_of_a_step(engine: OffloadEngine, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if step == "pack" and IS_COMPILED:
        pytest.skip("the compiled core calls nothing between finding a storage and its handle: needs the pure Python")
    device = engine.device
    places = {"copy-out": (device, "copy_out"), "release": (device, "wait_event"), "copy-in": (device, "allocate")}
    owner, name = places.get(step, (store, "PackedTensor"))

    def begin(now: str) -> None:
        if now == step:
            monkeypatch.setattr(owner, name, collecting(getattr(owner, name)))

    with engine.iteration():
        chunk = engine.start_chunk()
        chunk.open_group("group")
        shared = torch.ones(64)
        save_in_a_cycle(chunk, shared)
        begin("pack")
        kept = [chunk.tensor_push(shared if step == "pack" else torch.ones(64))]
        begin("copy-out")
        chunk.close_group()
        begin("release")
        release_all(engine)
        begin("copy-in")
        chunk.bulk_reload_group(0)
        assert len(engine._store.live) == 1, "the cycle was not collected, or more than that"
        assert chunk.tensor_pop(kept.pop()).eq(1).all()


@pytest.mark.timeout(60)  # a thread that waits for itself keeps the reset waiting, too
def test_collected_in_the_thread_that_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What retires there would wait for a copy that only this thread can do."""
    gate, write = threading.Event(), collecting(MemorySlab.write)
    monkeypatch.setattr(MemorySlab, "write", lambda *args: (gate.wait(30), write(*args)))
    config = OffloadConfig.from_flags(min_tensor_bytes=0, max_inflight_bytes=1 << 30)
    engine = OffloadEngine(config, CpuDevice("none"))
    with engine.iteration():
        chunk = engine.start_chunk()
        chunk.open_group("group")
        save_in_a_cycle(chunk, torch.ones(64))
        kept = [chunk.tensor_push(torch.ones(64))]
        chunk.close_group()
        copied_out = kept[0].storage.copied_out
        gate.set()  # no step is under way any more
        end = time.monotonic() + 10
        while not copied_out.is_done:
            assert time.monotonic() < end, "the thread waits for itself"
            time.sleep(0.001)
        assert len(engine._store.live) == 2 and is_free(engine._store._lock)
        release_all(engine)
        assert len(engine._store.live) == 1
        assert chunk.tensor_pop(kept.pop()).eq(1).all()
    assert engine.stats.num_storages_left == 0 == engine.pool.num_leases
    engine.close()


@pytest.mark.parametrize("operation", ["pack", "count"])
def test_what_an_operation_has_kept_waiting_is_retired_by_the_next(engine: OffloadEngine, operation: str) -> None:
    with engine.iteration():
        books, chunk = engine._store, engine.start_chunk()
        group = chunk.open_group("group")
        packed = chunk.tensor_push(torch.ones(64))
        with books._lock:  # an operation, in the middle of which the graph is freed
            del packed
        assert len(books.retired.dropped) == 1
        other = books.pack(torch.ones(64), group) if operation == "pack" else books.lent_bytes
        assert not books.retired.dropped and len(books.live) == (operation == "pack")
        del other
        chunk.close_group()


def test_every_operation_on_groups_holds_the_lock(engine: OffloadEngine) -> None:
    """Else the garbage collector could retire a storage in the middle of its copy."""
    queue = engine._store.retired
    queue.lock = lock = CountedLock(queue.lock)
    with engine.iteration():
        chunk = engine.start_chunk()
        chunk.open_group("group")
        packed = chunk.tensor_push(torch.ones(64))
        for operation in (
            chunk.close_group,
            lambda: engine._executor.turn_around(chunk.groups.progress),
            lambda: chunk.bulk_offload_group(0),
            lambda: chunk.bulk_reload_group(0),
        ):
            before = lock.num_taken
            operation()
            assert lock.num_taken > before, operation
        assert chunk.tensor_pop(packed).eq(1).all()
        del packed
