# SPDX-License-Identifier: Apache-2.0
"""A graph that is dropped without a backward leaves no byte behind, whatever packed its tensors."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload_engine import (
    IS_COMPILED,
    ChunkOffloadHandler,
    OffloadConfig,
    OffloadEngine,
    group_commit,
    group_start,
)
from offload_engine._devices import CpuDevice
from offload_engine._devices.memory_slab import MemorySlab
from offload_engine._saved import store
from offload_engine._saved.storage import SavedStorage, TensorGroup
from tests.adversarial import AdversarialDevice
from tests.cpu.test_engine import six_groups
from tests.engine_state import CountedLock, is_free, release_all


@contextmanager
def engine_on(device: Any = None, **settings: int) -> Iterator[OffloadEngine]:
    """An engine, by default on the adversarial device, of which nothing is left in the end."""
    config = OffloadConfig.from_flags(**{"min_tensor_bytes": 0, **settings})
    engine = OffloadEngine(config, device or AdversarialDevice())
    yield engine
    assert engine.stats.num_storages_left == 0 == engine.pool.num_leases
    assert not getattr(engine.device, "hazards", None)
    engine.close()


def test_a_step_leaves_nothing_to_the_collector() -> None:
    """A storage in a cycle would keep its events, and a CUDA event is recorded again only once it is unreferenced."""
    gc.collect()  # what other tests have left
    with engine_on() as engine:
        with engine.iteration():
            six_groups(engine).backward()
            assert engine.stats.copied_in_bytes > 0
        assert not [o for o in gc.get_objects() if type(o) in (SavedStorage, TensorGroup)]


@pytest.mark.parametrize("operation", [torch.sin, torch.exp, lambda x: torch.softmax(torch.tanh(x), -1)])
@pytest.mark.parametrize("min_tensor_bytes", [0, 1 << 20], ids=["moved", "too small to move"])
def test_in_a_group(operation: Callable[[torch.Tensor], torch.Tensor], min_tensor_bytes: int) -> None:
    """That saves its input, its output, and both ends of a chain."""
    with engine_on(min_tensor_bytes=min_tensor_bytes) as engine, engine.iteration():
        chunk = engine.start_chunk()
        y = group_start(torch.randn(64, requires_grad=True) * 1, chunk, "group")
        saved = [StorageWeakRef(y.untyped_storage())]
        with chunk.saved_tensors_hooks():
            y = operation(y)
        saved.append(StorageWeakRef(y.untyped_storage()))
        y = group_commit(y, chunk)
        del y, chunk
        engine.end_iteration()
        assert all(storage.expired() for storage in saved)
        assert engine.stats.num_storages_left == 0 and engine.pool.num_leases == 0
        engine.begin_iteration()


# -- graphs in a cycle, which the collector finds in the middle of something ------------------------------------------


def save_in_a_cycle(chunk: ChunkOffloadHandler, tensor: torch.Tensor) -> None:
    """Push `tensor`; only the collector can drop the handle."""
    cycle: list[Any] = [chunk.tensor_push(tensor)]
    cycle.append(cycle)


def collecting(function: Callable[..., Any]) -> Callable[..., Any]:
    def collect_first(*args: Any) -> Any:
        gc.collect()
        return function(*args)

    return collect_first


@pytest.mark.parametrize("step", ["pack", "copy-out", "release", "copy-in"])
def test_collected_in_the_middle_of_a_step(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if step == "pack" and IS_COMPILED:
        pytest.skip("the compiled core calls nothing between finding a storage and its handle: needs the pure Python")
    device = AdversarialDevice()
    places = {"copy-out": (device, "copy_out"), "release": (device, "wait_event"), "copy-in": (device, "allocate")}
    owner, name = places.get(step, (store, "PackedTensor"))

    def begin(now: str) -> None:
        if now == step:
            monkeypatch.setattr(owner, name, collecting(getattr(owner, name)))

    with engine_on(device, max_inflight_bytes=1 << 30) as engine, engine.iteration():
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
    with engine_on(CpuDevice("none"), max_inflight_bytes=1 << 30) as engine, engine.iteration():
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


@pytest.mark.parametrize("operation", ["pack", "count"])
def test_what_an_operation_has_kept_waiting_is_retired_by_the_next(operation: str) -> None:
    with engine_on() as engine, engine.iteration():
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


def test_every_operation_on_groups_holds_the_lock() -> None:
    """Else the garbage collector could retire a storage in the middle of its copy."""
    with engine_on() as engine:
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
