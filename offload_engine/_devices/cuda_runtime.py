# SPDX-License-Identifier: Apache-2.0
"""Makes the CUDA runtime calls of the hot path, directly through the library that torch has loaded.

torch's own stream and event objects cost 5 to 15 microseconds for each copy, record or wait in Python; a group makes
about fifteen of them. Here a stream is its handle, and an event is a handle that is reused once unreferenced.
"""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch

from offload_engine._compat import torch_private
from offload_engine._devices.base import CopyError
from offload_engine._devices.cuda_calls import HANDLE, declare, load_runtime, make_calls
from offload_engine._devices.regions import HostRegion, TensorSpec, check_copy_within, new_buffer

_NOT_READY = 600  # cudaErrorNotReady: the answer "no" of cudaEventQuery, not a failure
_NON_BLOCKING = 1  # cudaStreamNonBlocking: not ordered with the default stream, except by events
_WITH_TIMING = 0  # cudaEventDefault: takes longer to record
_DISABLE_TIMING = 2  # cudaEventDisableTiming: cheaper to record, and all that ordering needs
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2  # cudaMemcpyKind

DEFAULT_STREAM = 0  # `ExternalStream` takes this handle for "none given" and makes a new stream

_current_device: Final[Any] = torch_private.cuda_current_device
_current_stream: Final[Any] = torch_private.cuda_current_stream
_empty_strided: Final[Any] = torch_private.cuda_empty_strided


class CudaEvent:
    """A recorded event. Its handle is reused when the last reference is dropped."""

    __slots__ = ("handle", "is_done", "_idle")

    def __init__(self, handle: int, idle: list[int]) -> None:
        self.handle = handle
        self.is_done = False  # known to be complete, so that no further query is needed
        self._idle = idle

    # Compiled, no interrupt comes in here. In pure Python one may be lost, with the handle: a callback of a weak
    # reference, as in `host_read.py`, would double the time that each event takes.
    def __del__(self) -> None:
        self._idle.append(self.handle)


class CudaRuntime:
    """Makes calls on one device. A stream is the integer handle that `torch.cuda.Stream.cuda_stream` holds.

    Args:
        device: a CUDA device with an index.
        library: the CUDA runtime; None: the one that torch has loaded.

    Attributes:
        calls: of the library.

    Raises:
        CopyError: from every call that CUDA refuses; names CUDA's error.
    """

    def __init__(self, device: torch.device, library: ctypes.CDLL | None = None) -> None:
        self._device = device
        self._index: int = device.index
        self._library: Any = library or load_runtime()
        declare(self._library)
        self.calls: Any = make_calls(self._library)
        calls = self.calls
        # Bound once, because each group makes many of them.
        self._record, self._wait, self._wait_stream, self._query = (
            calls.record,
            calls.wait,
            calls.wait_stream,
            calls.query,
        )
        self._copy_all, self._last_error = calls.copy_all, calls.last_error
        self._elapsed = self._library.cudaEventElapsedTime  # thousands of calls for a recorded step
        self._records_graph = False
        self._idle: list[int] = []  # handles of events without a reference
        self._idle_marks: list[int] = []  # handles of events with timing, made while a step is recorded
        self._streams: list[int] = []

    def new_stream(self) -> int:
        """Make a separate stream: torch reuses a pool of 32, also for NCCL."""
        stream = self._create(self._library.cudaStreamCreateWithFlags, _NON_BLOCKING)
        self._streams.append(stream)
        return stream

    def finish(self) -> None:
        """Block the host until the work of all new streams is over."""
        self.check(self.calls.settle())
        for stream in self._streams:
            self.check(self._library.cudaStreamSynchronize(stream))

    def close(self) -> None:
        """Destroy the streams and the events without a reference; call `finish` first."""
        while self._streams:
            self._library.cudaStreamDestroy(self._streams.pop())
        for idle in (self._idle, self._idle_marks):
            while idle:
                self._library.cudaEventDestroy(idle.pop())

    def record_graph(self, is_recording: bool) -> None:
        """See `DeviceGraphs.record`."""
        self.check(self.calls.settle())
        self._records_graph = is_recording

    def record(self, stream: int) -> CudaEvent:
        """Record a new event after all work issued to `stream` so far; see `Device.record_event`."""
        event = self.unrecorded()
        self._record_on(stream, event)
        return event

    def mark_time(self, stream: int) -> CudaEvent:
        """Mark the time on `stream` by an event with timing; see `Device.mark_time`."""
        idle = self._idle_marks
        mark = CudaEvent(idle.pop() if idle else self._new_event(_WITH_TIMING), idle)
        self._record_on(stream, mark)
        return mark

    def milliseconds_between(self, first: CudaEvent, last: CudaEvent) -> float:
        """Return the time between marks, exact to half a microsecond; see `Device.milliseconds_between`."""
        if self.is_current:
            return self._between(first, last)
        with torch.cuda.device(self._device):  # or the first call of a new thread would make a context on device 0
            return self._between(first, last)

    def _between(self, first: CudaEvent, last: CudaEvent) -> float:
        for mark in (first, last):
            if not self.is_complete(mark):
                self.synchronize(mark)
                mark.is_done = True
        elapsed = ctypes.c_float()
        self.check(self._elapsed(ctypes.byref(elapsed), first.handle, last.handle))
        return elapsed.value

    def wait(self, stream: int, event: CudaEvent) -> None:
        """Make work issued to `stream` from now on wait for `event`; see `Device.wait_event`."""
        if event.is_done:
            return
        if stream or self.is_current:
            self.check(self._wait(stream, event.handle))
        else:
            with torch.cuda.device(self._device):
                self.check(self._wait(stream, event.handle))

    def wait_stream(self, stream: int, leader: int) -> None:
        """Make work issued to `stream` from now on wait for all work issued to `leader`; see `Device.wait_stream`."""
        idle = self._idle
        event = idle.pop() if idle else self._new_event(_DISABLE_TIMING)
        if (stream and leader) or self.is_current:
            self.check(self._wait_stream(stream, event, leader))
        else:
            with torch.cuda.device(self._device):
                self.check(self._wait_stream(stream, event, leader))
        idle.append(event)  # free again as soon as the wait is issued; lost if CUDA refuses it

    def is_complete(self, event: CudaEvent) -> bool:
        """Return whether `event` has completed without error; see `Device.is_complete`."""
        if not event.is_done:
            if self._records_graph:  # a query would invalidate the capture
                return False
            if self._query(event.handle) != 0:
                self._last_error()  # otherwise torch's next check would report "not ready" as its own error
                return False
            event.is_done = True
        return True

    def poll(self, event: CudaEvent) -> bool:
        """Return whether `event` has completed, for callers that poll; raise the error of an event that failed."""
        if not event.is_done:
            code = self._query(event.handle)
            if code == _NOT_READY:
                self._last_error()
                return False
            self.check(code)
            event.is_done = True
        return True

    def allocate(self, nbytes: int, stream: int, spec: TensorSpec | None = None) -> torch.Tensor:
        """As `Device.allocate`."""
        if stream == _current_stream(self._index):  # nearly always; saves a context manager
            if spec is None or not self.is_current:
                return new_buffer(nbytes, spec, self._device)
            buffer: torch.Tensor = _empty_strided(spec[1], spec[2], spec[3])
            return buffer
        with self.on(stream):
            return new_buffer(nbytes, spec, self._device)

    def on(self, stream: int) -> AbstractContextManager[Any]:
        """Return a context manager inside which torch allocates from the pool of `stream`."""
        if stream == _current_stream(self._index):
            return nullcontext()  # nearly always, and it takes a tenth of the time
        if stream == DEFAULT_STREAM:
            return torch.cuda.stream(torch.cuda.default_stream(self._device))
        return torch.cuda.stream(torch.cuda.ExternalStream(stream, self._device))

    def synchronize(self, event: CudaEvent) -> None:
        """Block the host until `event` has completed, without blocking other threads."""
        if self._records_graph:
            return
        self.check(self.calls.settle())
        self.check(self._library.cudaEventSynchronize(event.handle))

    def device_address(self, address: int) -> int | None:
        """Return the device address of pinned host memory; None if CUDA has not mapped it for this device."""
        found = HANDLE()
        with torch.cuda.device(self._device):
            code = self._library.cudaHostGetDevicePointer(ctypes.byref(found), address, 0)
        if code != 0:
            self._last_error()
        return found.value if code == 0 else None

    def copy_out(self, stream: int, copies: list[tuple[torch.Tensor, HostRegion]]) -> CudaEvent:
        """Issue copies into slabs of pinned memory; see `Device.copy_out`."""
        return self._copy(DEVICE_TO_HOST, addresses_out(copies), stream)

    def copy_in(self, stream: int, copies: list[tuple[HostRegion, torch.Tensor]]) -> CudaEvent:
        """Issue copies from slabs of pinned memory; see `Device.copy_in`."""
        return self._copy(HOST_TO_DEVICE, addresses_in(copies), stream)

    def _copy(self, kind: int, addresses: list[int], stream: int) -> CudaEvent:
        event = self.unrecorded()
        if self._records_graph:  # in a capture CUDA refuses batched copies, and records an event without a node
            for i in range(0, len(addresses), 3):
                self.check(self._copy_all(stream, event.handle, kind, addresses[i : i + 3]))
        else:
            self.check(self._copy_all(stream, event.handle, kind, addresses))
        return event

    def unrecorded(self) -> CudaEvent:
        """Return an event that has not been recorded yet."""
        return CudaEvent(self._idle.pop() if self._idle else self._new_event(_DISABLE_TIMING), self._idle)

    def _record_on(self, stream: int, event: CudaEvent) -> None:
        if stream or self.is_current:
            self.check(self._record(event.handle, stream))
        else:
            with torch.cuda.device(self._device):
                self.check(self._record(event.handle, stream))

    @property
    def is_current(self) -> bool:
        """Return whether this device is current, so that handle 0 means its own default stream."""
        return bool(_current_device() == self._index)

    def _new_event(self, flags: int) -> int:
        return self._create(self._library.cudaEventCreateWithFlags, flags)

    def _create(self, call: Any, flags: int) -> int:
        """Create an event or a stream."""
        handle = HANDLE()
        with torch.cuda.device(self._device):  # it belongs to the device that is current at its creation
            self.check(call(ctypes.byref(handle), flags))
        assert handle.value is not None
        return handle.value

    def check(self, code: int) -> None:
        """Raise the error of a code that a call has returned. No-op for 0."""
        if code != 0:
            self._last_error()
            runtime = torch.cuda.cudart()
            raise CopyError(f"CUDA error {code}: {runtime.cudaGetErrorString(runtime.cudaError(code))}")


def addresses_out(copies: list[tuple[torch.Tensor, HostRegion]]) -> list[int]:
    """Return target, source and size in bytes of each copy, checked."""
    addresses: list[int] = []
    slab: Any = None  # a `PinnedSlab`; read once, because regions of one group nearly always share theirs
    first = slab_bytes = 0
    for source, target in copies:
        if target.slab is not slab:
            slab = target.slab
            first, slab_bytes = slab.address, slab.nbytes
        address = check_copy_within(source, target, slab_bytes)
        addresses.append(first + target.offset)
        addresses.append(address)
        addresses.append(target.nbytes)
    return addresses


def addresses_in(copies: list[tuple[HostRegion, torch.Tensor]]) -> list[int]:
    """Return target, source and size in bytes of each copy, checked."""
    addresses: list[int] = []
    slab: Any = None
    first = slab_bytes = 0
    for source, target in copies:
        if source.slab is not slab:
            slab = source.slab
            first, slab_bytes = slab.address, slab.nbytes
        addresses.append(check_copy_within(target, source, slab_bytes))
        addresses.append(first + source.offset)
        addresses.append(source.nbytes)
    return addresses
