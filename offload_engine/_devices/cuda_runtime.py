"""The few CUDA runtime calls of the hot path, straight from the library that torch has loaded.

torch's own stream and event objects cost 5 to 15 microseconds for each copy, record or wait in Python; a group makes
about fifteen of them. Here a stream is its handle, and an event is a handle that is reused once unreferenced.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch

from offload_engine._compat import torch_private
from offload_engine._devices.base import CopyError
from offload_engine._devices.regions import HostRegion, check_copy

_NOT_READY = 600  # cudaErrorNotReady: the answer "no" of cudaEventQuery, not a failure
_NON_BLOCKING = 1  # cudaStreamNonBlocking: no order with the default stream but what is asked for
_WITH_TIMING = 0  # cudaEventDefault: takes longer to record
_DISABLE_TIMING = 2  # cudaEventDisableTiming: cheaper to record, and all that ordering needs
_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2  # cudaMemcpyKind
_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
_OVERLAP_WITH_COMPUTE = 1  # cudaMemcpyFlagPreferOverlapWithCompute: by the copy engines, not the multiprocessors
# In CUDA 12 the function of that name takes other arguments, and so it may again: a wrong guess is a wild write.
_BATCH_VERSIONS: Final = range(13000, 14000)

_current_device: Final[Any] = torch_private.cuda_current_device
_HANDLE = ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cudaStreamCreateWithFlags": (ctypes.POINTER(_HANDLE), ctypes.c_uint),
    "cudaStreamSynchronize": (_HANDLE,),
    "cudaStreamDestroy": (_HANDLE,),
    "cudaEventCreateWithFlags": (ctypes.POINTER(_HANDLE), ctypes.c_uint),
    "cudaEventRecord": (_HANDLE, _HANDLE),
    "cudaEventQuery": (_HANDLE,),
    "cudaEventSynchronize": (_HANDLE,),
    "cudaEventDestroy": (_HANDLE,),
    "cudaEventElapsedTime": (ctypes.POINTER(ctypes.c_float), _HANDLE, _HANDLE),
    "cudaStreamWaitEvent": (_HANDLE, _HANDLE, ctypes.c_uint),
    "cudaHostGetDevicePointer": (ctypes.POINTER(_HANDLE), _HANDLE, ctypes.c_uint),
    "cudaMemcpyAsync": (_HANDLE, _HANDLE, ctypes.c_size_t, ctypes.c_int, _HANDLE),
    "cudaGetLastError": (),
    "cudaRuntimeGetVersion": (ctypes.POINTER(ctypes.c_int),),
}


class CudaEvent:
    """A recorded event. Its handle goes back to be recorded again when the last reference goes."""

    __slots__ = ("handle", "is_done", "_idle")

    def __init__(self, handle: int, idle: list[int]) -> None:
        self.handle = handle
        self.is_done = False  # known to be complete, so that no further query is needed
        self._idle = idle

    def __del__(self) -> None:
        self._idle.append(self.handle)


class CudaRuntime:
    """Calls on one device. A stream is the integer handle that `torch.cuda.Stream.cuda_stream` holds.

    Args:
        device: with an index.
        library: the CUDA runtime; None: the one that torch has loaded.

    Raises:
        CopyError: from every call that CUDA refuses, with its name for the reason.
    """

    def __init__(self, device: torch.device, library: ctypes.CDLL | None = None) -> None:
        self._device = device
        self._index: int = device.index
        self._library: Any = library or _load_library()
        # Bound once: an attribute look-up in the library costs as much as the call.
        calls = hot_calls(self._library)
        self._record, self._wait, self._query, self._copy, self._last_error, self._copy_batch = calls
        self._elapsed = self._library.cudaEventElapsedTime  # thousands of calls for a recorded step
        self._has_batch: bool = has_batch_copy(self._library)
        self._idle: list[int] = []  # handles of events without a reference
        self._idle_marks: list[int] = []  # of those that tell the time, made while a step is recorded
        self._streams: list[int] = []

    def new_stream(self) -> int:
        """Make a stream of its own: torch reuses a pool of 32, also for NCCL."""
        stream = self._create(self._library.cudaStreamCreateWithFlags, _NON_BLOCKING)
        self._streams.append(stream)
        return stream

    def finish(self) -> None:
        """Block the host until the work of all new streams is over."""
        for stream in self._streams:
            self._check(self._library.cudaStreamSynchronize(stream))

    def close(self) -> None:
        """Destroy the streams and the events without a reference; call `finish` first."""
        while self._streams:
            self._library.cudaStreamDestroy(self._streams.pop())
        for idle in (self._idle, self._idle_marks):
            while idle:
                self._library.cudaEventDestroy(idle.pop())

    def record(self, stream: int) -> CudaEvent:
        """As `Device.record_event`: a new event after all work issued to `stream` so far."""
        event = CudaEvent(self._idle.pop() if self._idle else self._new_event(_DISABLE_TIMING), self._idle)
        self._record_on(stream, event)
        return event

    def mark_time(self, stream: int) -> CudaEvent:
        """Mark the time on `stream`, as `Device.mark_time`, by an event that can tell it."""
        idle = self._idle_marks
        mark = CudaEvent(idle.pop() if idle else self._new_event(_WITH_TIMING), idle)
        self._record_on(stream, mark)
        return mark

    def milliseconds_between(self, first: CudaEvent, last: CudaEvent) -> float:
        """Return the time from one mark to another, as `Device.milliseconds_between`; exact to half a microsecond."""
        if self._is_current:
            return self._between(first, last)
        with torch.cuda.device(self._device):  # or the first call of a new thread makes a context on device 0
            return self._between(first, last)

    def _between(self, first: CudaEvent, last: CudaEvent) -> float:
        for mark in (first, last):
            if not self.is_complete(mark):
                self.synchronize(mark)
                mark.is_done = True
        elapsed = ctypes.c_float()
        self._check(self._elapsed(ctypes.byref(elapsed), first.handle, last.handle))
        return elapsed.value

    def wait(self, stream: int, event: CudaEvent) -> None:
        """Make work issued to `stream` from now on wait for `event`; see `Device.wait_event`."""
        if event.is_done:
            return
        if stream or self._is_current:
            self._check(self._wait(stream, event.handle, 0))
        else:
            with torch.cuda.device(self._device):
                self._check(self._wait(stream, event.handle, 0))

    def is_complete(self, event: CudaEvent) -> bool:
        """As `Device.is_complete`: True if `event` has completed without error; never blocks, and never raises."""
        if not event.is_done:
            if self._query(event.handle) != 0:
                self._last_error()  # else torch's next check takes the answer "no" for an error of its own
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
            self._check(code)
            event.is_done = True
        return True

    def synchronize(self, event: CudaEvent) -> None:
        """Block the host until `event` has completed, and let other threads run meanwhile."""
        self._check(self._library.cudaEventSynchronize(event.handle))

    def device_address(self, address: int) -> int | None:
        """Return where kernels find pinned host memory; None if CUDA has not mapped it for this device."""
        found = _HANDLE()
        with torch.cuda.device(self._device):
            code = self._library.cudaHostGetDevicePointer(ctypes.byref(found), address, 0)
        if code != 0:
            self._last_error()
        return found.value if code == 0 else None

    def copy_out(self, stream: int, copies: Sequence[tuple[torch.Tensor, HostRegion]]) -> None:
        """Issue copies as `Device.copy_out`; the targets are in slabs of pinned memory."""
        sources = [check_copy(source, target).data_ptr() for source, target in copies]
        targets = [_address(target) for _, target in copies]
        self._copy_all(stream, targets, sources, [target.nbytes for _, target in copies], _DEVICE_TO_HOST)

    def copy_in(self, stream: int, copies: Sequence[tuple[HostRegion, torch.Tensor]]) -> None:
        """Issue copies as `Device.copy_in`; the sources are in slabs of pinned memory."""
        targets = [check_copy(target, source).data_ptr() for source, target in copies]
        sources = [_address(source) for source, _ in copies]
        self._copy_all(stream, targets, sources, [source.nbytes for source, _ in copies], _HOST_TO_DEVICE)

    def _copy_all(self, stream: int, targets: list[int], sources: list[int], sizes: list[int], kind: int) -> None:
        # One call takes the host less time than one for each copy. CUDA refuses it on the default stream.
        if len(sizes) > 1 and self._has_batch and stream:
            self._check(self._copy_batch(stream, *targets, *sources, *sizes))
            return
        for i, nbytes in enumerate(sizes):
            self._check(self._copy(targets[i], sources[i], nbytes, kind, stream))

    def _record_on(self, stream: int, event: CudaEvent) -> None:
        if stream or self._is_current:
            self._check(self._record(event.handle, stream))
        else:
            with torch.cuda.device(self._device):
                self._check(self._record(event.handle, stream))

    @property
    def _is_current(self) -> bool:
        """The default stream has the handle 0 on every device, and means that of the current one."""
        return bool(_current_device() == self._index)

    def _new_event(self, flags: int) -> int:
        return self._create(self._library.cudaEventCreateWithFlags, flags)

    def _create(self, call: Any, flags: int) -> int:
        """Create an event or a stream."""
        handle = _HANDLE()
        with torch.cuda.device(self._device):  # it belongs to the device that is current at its creation
            self._check(call(ctypes.byref(handle), flags))
        assert handle.value is not None
        return handle.value

    def _check(self, code: int) -> None:
        if code != 0:
            self._last_error()
            runtime = torch.cuda.cudart()
            raise CopyError(f"CUDA error {code}: {runtime.cudaGetErrorString(runtime.cudaError(code))}")


def hot_calls(library: ctypes.CDLL) -> tuple[Callable[..., int], ...]:
    """The calls that each group makes, of the runtime in `library`: record, wait, query, copy, last error, copy batch.

    Through our own extension module where the package was compiled, else through ctypes. Arguments are those of CUDA,
    except for copy batch: the stream, then all targets, all sources and all sizes. It raises unless `has_batch_copy`.
    """
    for name, arguments in _SIGNATURES.items():
        getattr(library, name).argtypes = arguments
        getattr(library, name).restype = ctypes.c_int
    events = (library.cudaEventRecord, library.cudaStreamWaitEvent, library.cudaEventQuery)
    functions = (*events, library.cudaMemcpyAsync, library.cudaGetLastError)
    has_batch = has_batch_copy(library)
    try:
        from offload_engine._devices._cuda_calls import Calls
    except ImportError:  # installed as pure Python
        return *functions, partial(_copy_batch, library) if has_batch else _no_copy_batch
    batch = library.cudaMemcpyBatchAsync if has_batch else 0  # which refuses as `_no_copy_batch` does
    calls = Calls(*[ctypes.cast(function, _HANDLE).value or 0 for function in (*functions, batch)])
    return calls.record, calls.wait, calls.query, calls.copy, calls.last_error, calls.copy_batch


def has_batch_copy(library: ctypes.CDLL) -> bool:
    """Return whether the runtime in `library` has `cudaMemcpyBatchAsync`, with the arguments of CUDA 13."""
    version = ctypes.c_int()
    code: int = library.cudaRuntimeGetVersion(ctypes.byref(version))
    return code == 0 and version.value in _BATCH_VERSIONS and hasattr(library, "cudaMemcpyBatchAsync")


def _copy_batch(library: ctypes.CDLL, stream: int, *values: int) -> int:
    """Copy a batch through ctypes, as the extension module does in C."""
    count = len(values) // 3
    addresses, sizes = _HANDLE * count, ctypes.c_size_t * count
    attributes = (ctypes.c_int * 6)(_STREAM_ORDER, 0, 0, 0, 0, _OVERLAP_WITH_COMPUTE)  # cudaMemcpyAttributes
    code: int = library.cudaMemcpyBatchAsync(
        addresses(*values[:count]),
        addresses(*values[count : 2 * count]),
        sizes(*values[2 * count :]),
        ctypes.c_size_t(count),
        attributes,
        ctypes.byref(ctypes.c_size_t(0)),  # they are those of all copies from the first on
        ctypes.c_size_t(1),
        _HANDLE(stream),
    )
    return code


def _no_copy_batch(*values: int) -> int:
    raise RuntimeError("copy_batch(): this CUDA runtime has no cudaMemcpyBatchAsync of CUDA 13")


def _load_library() -> ctypes.CDLL:
    """Load the runtime that torch itself uses: another copy would have other streams and errors."""
    process = ctypes.CDLL(None)
    if hasattr(process, "cudaMemcpyAsync"):
        return process
    major = (torch.version.cuda or "").partition(".")[0]
    return ctypes.CDLL(f"libcudart.so.{major}")  # loaded already: this only finds it


def _address(region: HostRegion) -> int:
    slab: Any = region.slab  # a `PinnedSlab`
    address: int = slab.address
    return address + region.offset
