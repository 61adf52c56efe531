# SPDX-License-Identifier: Apache-2.0
"""The CUDA device on a real GPU: order by events alone, memory by keeping references, pinned slabs, small reads.

Storages held outside autograd; other settings of CUDA's caching allocator than the default.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import pytest
import torch

from offload_engine import FixedBounds, OffloadConfig, OffloadEngine
from offload_engine._devices import HostRegion
from offload_engine._devices.cuda import CudaDevice
from offload_engine._devices.host_read import MappedRead
from offload_engine._devices.pinned import PinnedSlab, _register
from offload_engine.planning.allocations import ALLOCATED, FREE_ASKED
from offload_engine.planning.segments import SegmentAllocator
from tests.engine_state import release_all

MIB = 1 << 20
LATE_CYCLES = 200_000_000  # about 0.1 s: long enough that a missing wait is seen every time


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    torch.cuda.empty_cache()  # tests compare addresses
    device = CudaDevice()
    yield device
    device.close()


def garbage(nbytes: int) -> torch.Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8, device="cuda")


def delay(stream: int) -> None:
    """Keep a stream busy.

    Args:
        stream: its handle; not that of the default stream.
    """
    with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
        torch.cuda._sleep(LATE_CYCLES)


def pool_of(tensor: torch.Tensor) -> int:
    """Return the handle of the stream from whose allocator pool the tensor's memory is."""
    address = tensor.data_ptr()
    [segment] = [s for s in torch.cuda.memory_snapshot() if 0 <= address - s["address"] < s["total_size"]]
    return int(segment["stream"])


@pytest.mark.parametrize("num_copies", [1, 2, 6, 70])
def test_bytes_of_one_call_come_back_equal(device: CudaDevice, num_copies: int) -> None:
    out, back, compute = device.new_stream("out"), device.new_stream("in"), device.current_stream()
    sizes = [(1, 5 * MIB, 511, 4097, MIB + 3, 3 * MIB + 1)[i % 6] for i in range(num_copies)]
    slab = device.new_slab(num_copies * 5 * MIB)
    regions = [HostRegion(slab, i * 5 * MIB, nbytes) for i, nbytes in enumerate(sizes)]
    sources = [garbage(nbytes) for nbytes in sizes]
    device.wait_stream(out, compute)
    copied_out = device.copy_out(out, list(zip(sources, regions, strict=True)))
    device.wait_event(back, copied_out)
    targets = [device.allocate(nbytes, compute) for nbytes in sizes]
    device.wait_event(back, device.record_event(compute))
    device.copy_in(back, list(zip(regions, targets, strict=True)))
    device.wait_event(compute, device.record_event(back))
    assert all(torch.equal(source, target) for source, target in zip(sources, targets, strict=True))
    device.synchronize(copied_out)
    on_host = [slab.view(region.offset, region.nbytes) for region in regions]
    assert all(torch.equal(source.cpu(), held) for source, held in zip(sources, on_host, strict=True))


@pytest.mark.parametrize("for_what", ["event", "stream", "nothing"])
def test_a_wait_orders_two_streams_without_the_host(device: CudaDevice, for_what: str) -> None:
    """Without one the delay is seen: the targets get the first content of the slab."""
    out, back, compute = device.new_stream("out"), device.new_stream("in"), device.current_stream()
    slab = device.new_slab(2 * MIB)
    regions = [HostRegion(slab, 0, MIB), HostRegion(slab, MIB, MIB)]
    sources = [torch.ones(MIB, dtype=torch.uint8, device="cuda") for _ in regions]
    targets = [garbage(MIB) for _ in regions]
    torch.cuda.synchronize()
    delay(out)
    copied_out = device.copy_out(out, list(zip(sources, regions, strict=True)))
    if for_what == "event":
        device.wait_event(back, copied_out)
    elif for_what == "stream":
        device.wait_stream(back, out)
    copied_in = device.copy_in(back, list(zip(regions, targets, strict=True)))
    assert for_what == "nothing" or not device.is_complete(copied_in)
    device.wait_event(compute, copied_in)
    assert all(target.eq(for_what != "nothing").all() for target in targets)
    torch.cuda.synchronize()


def test_device_streams_are_not_handed_out_by_torch(device: CudaDevice) -> None:
    """torch hands out the same 32 again and again, also to NCCL: a copy there would wait for work of others."""
    streams = {device.new_stream("out"), device.new_stream("in")}
    assert len(streams) == 2
    assert not streams & {torch.cuda.Stream().cuda_stream for _ in range(64)}


def test_buffers_come_from_the_pool_of_the_compute_stream(device: CudaDevice) -> None:
    """Whatever stream is current. The handle of the default stream is 0, which `ExternalStream` does not take."""
    streams = [torch.cuda.default_stream(), torch.cuda.Stream()]
    for compute, current in [(streams[0], streams[0]), *permutations(streams)]:
        with torch.cuda.stream(current):
            buffer = device.allocate(8 * MIB, compute.cuda_stream)
        assert pool_of(buffer) == compute.cuda_stream


def test_a_dropped_source_is_reusable_at_once(device: CudaDevice) -> None:
    """`record_stream` would keep the block until a later poll of its event."""
    stream, region = device.new_stream("out"), HostRegion(device.new_slab(32 * MIB), 0, 32 * MIB)
    source = garbage(32 * MIB)
    device.wait_event(stream, device.record_event(device.current_stream()))
    device.copy_out(stream, [(source, region)])
    device.wait_event(device.current_stream(), device.record_event(stream))
    address = source.data_ptr()
    del source
    assert torch.empty(32 * MIB, dtype=torch.uint8, device="cuda").data_ptr() == address
    torch.cuda.synchronize()


def test_slabs_are_pinned_until_closed(device: CudaDevice) -> None:
    slab = device.new_slab(4 * MIB)
    assert slab.view(0, 16).is_pinned()
    slab.close()
    slab.close()
    with pytest.raises(RuntimeError, match="closed"):
        slab.view(0, 16)


def test_a_refused_registration_is_a_memory_error_and_blames_no_kernel() -> None:
    slab = PinnedSlab(MIB)
    with pytest.raises(MemoryError, match="cannot pin"):
        _register(slab.view(0, 1).data_ptr(), MIB)  # twice is refused
    assert torch.ones(8, device="cuda").sum().item() == 8
    slab.close()


def test_close_waits_and_is_idempotent() -> None:
    device = CudaDevice()
    stream, slab = device.new_stream("out"), device.new_slab(MIB)
    region = HostRegion(slab, 0, MIB)
    delay(stream)
    device.copy_out(stream, [(garbage(MIB), region)])
    event = device.record_event(stream)
    device.close()
    device.close()
    assert device.is_complete(event)
    with pytest.raises(RuntimeError, match="closed"):
        device.new_slab(MIB)


# -- small reads past the copy engine; what becomes of their slots is tested without a GPU -----------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (1,), (7, 9), (64,)])
def test_every_bit_arrives(device: CudaDevice, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source = torch.randint(-100, 100, shape, device="cuda").to(dtype)
    read = device.host_read(source)
    assert isinstance(read, MappedRead)
    assert torch.equal(read.wait(), source.cpu())
    assert read.tensor.dtype is dtype and read.tensor.shape == source.shape and not read.tensor.is_cuda


def test_a_read_is_behind_the_work_of_its_stream(device: CudaDevice) -> None:
    source = torch.zeros(4, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        source.fill_(3)
        read = device.host_read(source)
    assert read.wait().tolist() == [3.0] * 4


def test_a_read_does_not_stand_behind_bulk_copies(device: CudaDevice) -> None:
    nbytes = 512 * MIB
    stream, region = device.new_stream("out"), HostRegion(device.new_slab(nbytes), 0, nbytes)
    bulk, small = torch.zeros(nbytes, dtype=torch.uint8, device="cuda"), torch.arange(64, device="cuda")
    device.host_read(small).wait()
    times = {}
    for name in ("plain", "mapped"):
        torch.cuda.synchronize()
        device.copy_out(stream, [(bulk, region)])
        start = time.perf_counter()
        small.cpu() if name == "plain" else device.host_read(small).wait()
        times[name] = time.perf_counter() - start
    assert times["mapped"] < 0.5e-3 < times["plain"]


# -- other settings of CUDA's caching allocator than the default, which is read once in a process ----------------------

ROOT = Path(__file__).parents[2]
TRAIN = """
import torch
from torch import nn
from offload_engine import OffloadConfig, enable_activation_offloading

def train(offload):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8))).cuda()
    handle = None
    if offload:
        config = OffloadConfig(min_tensor_bytes=0)
        handle = enable_activation_offloading(model, "none", layers=list(model), config=config)
    found = []
    for step in range(4):
        torch.manual_seed(step)
        x = torch.randn(1024 + 512 * (step % 3), 1024, device="cuda")
        model.zero_grad()
        loss = model(x).pow(2).sum()
        loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
    return found, handle

plain, _ = train(False)
offloaded, handle = train(True)
assert all(map(torch.equal, plain, offloaded))
assert handle.stats.copied_out_bytes > 0 and handle.stats.num_storages_left == 0
handle.remove()
"""


@pytest.mark.parametrize("settings", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_losses_and_gradients_are_equal_to_the_last_bit(settings: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTORCH_CUDA_ALLOC_CONF": settings}
    ended = subprocess.run([sys.executable, "-c", TRAIN], env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr[-2000:]


# -- storages held outside autograd: the process gets their memory back, and the holder the bytes ----------------------


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


def test_allocations_are_recorded_with_their_addresses_and_counted(device: CudaDevice) -> None:
    memory = device.memory
    assert memory is not None and memory.record()
    assert not memory.record(), "it must not disturb the recording of another caller"
    begin = memory.count()
    first = garbage(3 * MIB)
    at, between = first.untyped_storage().data_ptr(), memory.count() - begin
    del first
    second = garbage(64 * MIB)
    num = memory.count() - begin
    log = memory.recorded()
    assert log is not None
    counted = [event for event in log.events if event.kind in (ALLOCATED, FREE_ASKED)]
    assert len(counted) == num > between > 0
    assert at in {event.at for event in counted[:between]}, "it was allocated before"
    reserved = sum(nbytes for segment in log.segments for nbytes, _ in segment.blocks)
    assert reserved == torch.cuda.memory_reserved()
    allocator = SegmentAllocator()
    assert second.untyped_storage().data_ptr() in allocator.adopt(log.segments)
    assert allocator.reserved_bytes == reserved and allocator.allocated_bytes == torch.cuda.memory_allocated()
    assert memory.record()  # it can again
    memory.recorded()


def test_memory_is_reserved_at_once_if_there_is_so_much(device: CudaDevice) -> None:
    memory = device.memory
    assert memory is not None
    reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    for nbytes, more in ((-1, 0), (0, 0), (1 << 50, 0), (64 * MIB, 64 * MIB)):
        memory.reserve(nbytes)
        assert torch.cuda.memory_reserved() == reserved + more
    torch.empty(33 * MIB, dtype=torch.uint8, device="cuda")
    assert (torch.cuda.memory_reserved(), torch.cuda.memory_allocated()) == (reserved + 64 * MIB, allocated)
    memory.trim()
