# SPDX-License-Identifier: Apache-2.0
"""Slots of small reads without a GPU: plain memory for the mapped slab, a runtime that says when a kernel is over."""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from offload_engine._compat import torch_private
from offload_engine._devices import host_read
from offload_engine._devices.base import PlainRead
from offload_engine._devices.host_read import SLOT_BYTES, MappedRead, MappedReader

NUM_SLOTS = 3


class Slab:
    """Plain memory in place of pinned memory."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory = (ctypes.c_byte * nbytes)()
        self.address = ctypes.addressof(self.memory)


class Event:
    def __init__(self, is_over: bool) -> None:
        self.is_over = is_over


class Runtime:
    """Records events that are over at once, or when a test says so."""

    def __init__(self) -> None:
        self.is_slow = False
        self.is_mapped = True
        self.offset = 0  # of what kernels see behind what the host sees
        self.events: list[Event] = []

    def record(self, stream: int) -> Event:
        assert stream == 7
        self.events.append(Event(not self.is_slow))
        return self.events[-1]

    def is_complete(self, event: Event) -> bool:
        return event.is_over

    def poll(self, event: Event) -> bool:
        return event.is_over

    def device_address(self, address: int) -> int | None:
        return address + self.offset if self.is_mapped else None


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


@pytest.fixture
def new_reader(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> Callable[[], MappedReader]:
    def view(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
        # As on the device it does not keep the memory, and a tensor made in inference mode is one of that mode.
        memory = (ctypes.c_byte * nbytes).from_address(address - runtime.offset)
        return torch.frombuffer(memory, dtype=torch.uint8)

    monkeypatch.setattr(host_read, "PinnedSlab", Slab)
    monkeypatch.setattr(host_read, "_NUM_SLOTS", NUM_SLOTS)
    monkeypatch.setattr(host_read, "_device_view", view)
    monkeypatch.setattr(torch_private, "cuda_current_stream", lambda index: 7)
    made: Any = runtime  # stands in for CudaRuntime
    return lambda: MappedReader(torch.device("cuda", 0), made)


@pytest.fixture
def reader(new_reader: Callable[[], MappedReader]) -> MappedReader:
    return new_reader()


def numbers(i: int) -> torch.Tensor:
    return torch.full((4,), i)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(), (7, 9), (9, 7), (SLOT_BYTES // 8,)])
def test_every_bit_arrives(reader: MappedReader, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Into a slot that was used for other types and shapes, and of a source with a gradient, transposed."""
    assert reader.read(torch.zeros(63)).wait().sum() == 0
    for _ in range(2):  # with what was kept from the first read, too
        bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)  # negative zeros and NaNs among them
        source = (bits % 2 if dtype is torch.bool else bits).view(dtype).squeeze(-1)
        source = source.requires_grad_(dtype.is_floating_point).T if source.ndim == 2 else source
        read = reader.read(source)
        assert isinstance(read, MappedRead)
        result = read.wait()
        assert result.dtype is dtype and result.shape == source.shape and result.is_contiguous()
        assert torch.equal(_bytes(result), _bytes(source)) and not result.requires_grad
        assert result.data_ptr() != source.data_ptr()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def test_a_tensor_without_a_slot_is_read_plainly(reader: MappedReader) -> None:
    """It is too large, empty or too wide; or none is free."""
    wide = torch.tensor([1 + 2j], dtype=torch.complex128)
    for source in (torch.arange(SLOT_BYTES), torch.empty(0), wide):
        read = reader.read(source)
        assert isinstance(read, PlainRead) and torch.equal(read.wait(), source)
    held = [reader.read(torch.full((SLOT_BYTES // 8,), i)).wait() for i in range(NUM_SLOTS)]
    read = reader.read(numbers(9))
    assert isinstance(read, PlainRead) and read.wait().tolist() == [9] * 4
    address = held.pop(1).data_ptr()
    assert reader.read(numbers(8)).wait().data_ptr() == address
    assert held[0].eq(0).all() and held[1].eq(2).all()
    reader._free = type("TakenFrom", (deque,), {"__len__": lambda self: 1})()  # another thread, since the look at it
    assert isinstance(reader.read(numbers(0)), PlainRead)


def test_conjugate_and_negative_views_are_what_they_stand_for(reader: MappedReader) -> None:
    """Their storage holds other bits than they do."""
    source = torch.complex(torch.arange(4.0), torch.arange(4.0) - 2)
    for view in (source.conj(), source.conj().imag, torch._neg_view(source.real), source.conj()[1:]):
        assert view.is_conj() or view.is_neg()
        read = reader.read(view)
        assert isinstance(read, MappedRead) and not read.tensor.is_conj() and not read.tensor.is_neg()
        assert torch.equal(read.wait(), view.resolve_conj().resolve_neg())


def test_kernels_write_where_the_device_sees_the_memory(
    new_reader: Callable[[], MappedReader], runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    """CUDA may map host memory under another address than the host's, or not at all."""
    runtime.offset = 1 << 40
    assert new_reader().read(numbers(3)).wait().tolist() == [3] * 4
    runtime.is_mapped = False
    read = new_reader().read(numbers(3))
    assert isinstance(read, PlainRead) and read.wait().tolist() == [3] * 4
    assert "not mapped" in caplog.text


@pytest.mark.parametrize(
    "part", [lambda t: t[1:3], lambda t: t.numpy()[1:3], lambda t: t.detach(), lambda t: t.untyped_storage()]
)
def test_view_of_a_result_holds_its_slot(reader: MappedReader, part: Callable[[Any], Any]) -> None:
    """And gives it back without a line of Python, in which an interrupt would be lost."""
    events = list[str]()
    result = reader.read(numbers(5)).wait()
    address, left = result.data_ptr(), part(result)
    expected = bytes(left)
    del result
    others = [reader.read(numbers(i)).wait() for i in range(NUM_SLOTS - 1)]
    assert address not in {other.data_ptr() for other in others}
    assert isinstance(reader.read(numbers(0)), PlainRead) and bytes(left) == expected
    sys.setprofile(lambda frame, event, _: events.append(event))
    del left
    sys.setprofile(None)
    assert "call" not in events and reader.read(numbers(0)).wait().data_ptr() == address


def test_an_abandoned_read_keeps_its_slot_and_a_wait_lasts(reader: MappedReader, runtime: Runtime) -> None:
    runtime.is_slow = True
    abandoned = reader.read(numbers(1)).tensor.data_ptr()
    read, done = reader.read(numbers(1)), threading.Event()
    waiting = threading.Thread(target=lambda: [call() for call in (read.wait, done.set)], daemon=True)
    waiting.start()
    runtime.is_slow = False
    others = [reader.read(numbers(i)).wait() for i in range(NUM_SLOTS - 2)]
    assert abandoned not in {other.data_ptr() for other in others}
    assert isinstance(reader.read(numbers(0)), PlainRead) and not done.wait(0.05)
    runtime.events[1].is_over = True
    waiting.join(10)
    assert done.is_set() and isinstance(reader.read(numbers(0)), PlainRead)
    runtime.events[0].is_over = True
    assert reader.read(numbers(2)).wait().data_ptr() == abandoned


def test_other_shapes_in_each_step_keep_little(reader: MappedReader) -> None:
    for size in range(1, 200):
        assert torch.equal(reader.read(torch.arange(size)).wait(), torch.arange(size))
    assert max(len(lease.slot.targets) for lease in reader._free) <= host_read._MAX_TARGETS


def test_reads_in_and_out_of_inference_mode(new_reader: Callable[[], MappedReader]) -> None:
    with torch.inference_mode():
        reader = new_reader()  # as the first read makes it
        assert reader.read(numbers(1)).wait().tolist() == [1] * 4
    assert reader.read(numbers(2)).wait().tolist() == [2] * 4
    with torch.inference_mode():
        assert reader.read(numbers(3)).wait().tolist() == [3] * 4


def test_the_memory_outlives_the_reader_under_a_result(new_reader: Callable[[], MappedReader]) -> None:
    reader = new_reader()
    slab = weakref.ref(reader._free[0].slot.slab)
    result = reader.read(numbers(5)).wait()
    part = result[1:3]
    del reader, result
    assert slab() is not None and part.tolist() == [5, 5]
    del part
    assert slab() is None  # at once: nothing of it is in a cycle


def test_threads_that_read_at_once(reader: MappedReader) -> None:
    def read_many(i: int) -> int:
        values = range(2000 * i, 2000 * (i + 1))
        return sum(reader.read(numbers(value)).wait().tolist() == [value] * 4 for value in values)

    with ThreadPoolExecutor(NUM_SLOTS + 1) as pool:
        assert [*pool.map(read_many, range(NUM_SLOTS + 1))] == [2000] * (NUM_SLOTS + 1)
    assert len(reader._free) == NUM_SLOTS
