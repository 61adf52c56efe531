# SPDX-License-Identifier: Apache-2.0
"""Small reads past the copy engine, on a real GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from offload_engine._devices import HostRegion
from offload_engine._devices.cuda import CudaDevice
from offload_engine._devices.host_read import SLOT_BYTES, MappedRead

MIB = 1 << 20


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    device = CudaDevice()
    yield device
    device.close()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (1,), (7, 9), (64,)])
def test_every_bit_arrives(device: CudaDevice, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source = torch.randint(-100, 100, shape, device="cuda").to(dtype)
    read = device.host_read(source)
    assert isinstance(read, MappedRead)
    assert torch.equal(read.wait(), source.cpu())
    assert read.tensor.dtype is dtype and read.tensor.shape == source.shape and not read.tensor.is_cuda


def test_negative_zero_and_nan_payloads(device: CudaDevice) -> None:
    bits = torch.tensor([-(2**31), 0x7FC12345, 0x7F800001], dtype=torch.int32, device="cuda")
    assert torch.equal(device.host_read(bits.view(torch.float32)).wait().view(torch.int32), bits.cpu())


def test_a_transposed_source(device: CudaDevice) -> None:
    source = torch.arange(12, device="cuda").view(3, 4).t()
    assert torch.equal(device.host_read(source).wait(), source.cpu())


def test_conjugate_and_negative_views(device: CudaDevice) -> None:
    source = torch.complex(torch.arange(4.0), torch.arange(4.0) - 2).cuda()
    for view in (source.conj(), source.conj().imag):
        read = device.host_read(view)
        assert isinstance(read, MappedRead)
        assert torch.equal(read.wait(), view.cpu().resolve_conj().resolve_neg())


def test_a_large_tensor_is_read_the_plain_way(device: CudaDevice) -> None:
    source = torch.arange(SLOT_BYTES, device="cuda")
    read = device.host_read(source)
    assert not isinstance(read, MappedRead)
    assert torch.equal(read.wait(), source.cpu())


def test_results_stay_valid_while_they_are_held(device: CudaDevice) -> None:
    reads = [device.host_read(torch.full((8,), i, device="cuda")) for i in range(2000)]  # more than there are slots
    assert [read.wait()[0].item() for read in reads] == list(range(2000))
    views = [read.tensor.numpy()[1:3] for read in reads[:100]]
    del reads
    for i in range(1000):
        device.host_read(torch.full((8,), -i, device="cuda")).wait()
    assert [int(view[0]) for view in views] == list(range(100))


def test_reads_of_one_shape_share_no_memory_until_they_are_dropped(device: CudaDevice) -> None:
    first, second = (device.host_read(torch.full((8,), i, device="cuda")).wait() for i in (1, 2))
    address = first.data_ptr()
    assert address != second.data_ptr() and first.tolist() == [1] * 8 and second.tolist() == [2] * 8
    del first
    third = device.host_read(torch.full((8,), 3, device="cuda")).wait()
    assert third.data_ptr() == address and third.tolist() == [3] * 8 and second.tolist() == [2] * 8


def test_an_abandoned_read_keeps_its_slot_until_its_kernel_is_over(device: CudaDevice) -> None:
    source, small = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")
    device.host_read(small).wait()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)  # half a second
        abandoned = device.host_read(source).tensor.data_ptr()
    results = [device.host_read(small).wait() for _ in range(10)]
    assert not stream.query()
    assert abandoned not in {result.data_ptr() for result in results}
    stream.synchronize()
    while isinstance(read := device.host_read(small), MappedRead):
        results.append(read.wait())
    assert abandoned in {result.data_ptr() for result in results}
    assert all(result.tolist() == [1.0] * 4 for result in results)


def test_a_result_outlives_the_device() -> None:
    device = CudaDevice()
    result = device.host_read(torch.arange(8, device="cuda")).wait()
    device.close()
    del device
    assert result.tolist() == list(range(8))


def test_reads_in_and_out_of_inference_mode(device: CudaDevice) -> None:
    small = torch.arange(8, device="cuda")
    with torch.inference_mode():
        assert device.host_read(small).wait().tolist() == list(range(8))
    assert device.host_read(small).wait().tolist() == list(range(8))
    assert device.host_read(small > 3).wait().tolist() == [False] * 4 + [True] * 4


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
