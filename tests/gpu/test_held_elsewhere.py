# SPDX-License-Identifier: Apache-2.0
"""Storages held outside autograd, on a real GPU: the process gets their memory back, and the holder the bytes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import pytest
import torch

from offload_engine import FixedBounds, OffloadConfig, OffloadEngine
from offload_engine._devices.cuda import CudaDevice
from tests.engine_state import release_all
from tests.gpu.streams import delay, pool_of

MIB = 1 << 20


@pytest.fixture
def engine() -> Iterator[OffloadEngine]:
    torch.cuda.empty_cache()  # tests compare addresses
    engine = OffloadEngine(
        OffloadConfig(min_tensor_bytes=0, policy=FixedBounds(max_inflight_bytes=1 << 40, horizon_bytes=0))
    )
    yield engine
    engine.close()


def square(engine: OffloadEngine, x: torch.Tensor) -> torch.Tensor:
    chunk = engine.start_chunk()
    chunk.open_group("square")
    with chunk.saved_tensors_hooks():
        out = x.square()
    chunk.close_group()
    return out


def test_memory_falls_although_it_is_held_and_bytes_come_back(engine: OffloadEngine) -> None:
    x = torch.randn(16 * MIB, device="cuda", requires_grad=True)
    expected, nbytes = x.detach().cpu(), 64 * MIB
    with engine.iteration():
        out = square(engine, x)
        before = torch.cuda.memory_allocated()
        engine.held_elsewhere(x)
        release_all(engine)
        assert torch.cuda.memory_allocated() == before - nbytes and x.untyped_storage().nbytes() == 0
        out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.detach().cpu(), expected) and torch.equal(x.grad.cpu(), 2 * expected)


def test_late_copy_out_is_not_overtaken_by_the_next_owner_of_its_bytes(engine: OffloadEngine) -> None:
    x = torch.ones(MIB, device="cuda", requires_grad=True)
    address = x.data_ptr()
    with engine.iteration():
        torch.cuda.synchronize()
        delay(engine._store.context.copy_out_stream)
        out = square(engine, x)
        engine.held_elsewhere(x)
        release_all(engine)
        taken = torch.full((MIB,), 5.0, device="cuda")
        assert taken.data_ptr() == address  # else this test shows nothing
        delay(engine._store.context.copy_in_stream)
        out.sum().backward()  # not behind a copy-in that is late either
    assert x.grad is not None and x.eq(1).all() and x.grad.eq(2).all() and taken.eq(5).all()


def test_bytes_are_restored_from_the_pool_of_the_compute_stream() -> None:
    device = CudaDevice()
    x = torch.ones(MIB, device="cuda")
    device.empty(x.untyped_storage())
    for compute, current in permutations([torch.cuda.default_stream(), torch.cuda.Stream()]):
        with torch.cuda.stream(current):
            buffer = device.restore(x.untyped_storage(), 4 * MIB, compute.cuda_stream)
            assert pool_of(torch.empty(4 * MIB, device="cuda")) == current.cuda_stream
        assert pool_of(x) == pool_of(buffer) == compute.cuda_stream
        assert buffer.data_ptr() == x.data_ptr() and buffer.nbytes == 4 * MIB
        del buffer
        device.empty(x.untyped_storage())
    device.close()
