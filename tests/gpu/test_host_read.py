# SPDX-License-Identifier: Apache-2.0
"""Small reads past the copy engine, on a real GPU. What becomes of their slots is tested without one."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from offload_engine._devices import HostRegion
from offload_engine._devices.cuda import CudaDevice
from offload_engine._devices.host_read import MappedRead

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


def test_a_result_outlives_the_device() -> None:
    device = CudaDevice()
    result = device.host_read(torch.arange(8, device="cuda")).wait()
    device.close()
    del device
    assert result.tolist() == list(range(8))


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
