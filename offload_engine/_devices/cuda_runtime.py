"""The few CUDA runtime calls of the hot path, straight from the library that torch has loaded.

torch's own stream and event objects cost 5 to 15 microseconds for each copy, record or wait in Python; a group makes
about fifteen of them. Here a stream is its handle, and an event is a handle that is reused once nobody holds it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from .base import CopyError
from .regions import HostRegion, check_copy

_NOT_READY = 600  # cudaErrorNotReady: the answer "no" of cudaEventQuery, not a failure
_DISABLE_TIMING = 2  # cudaEventDisableTiming: cheaper to record, and all that ordering needs
_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2  # cudaMemcpyKind

_HANDLE = ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cudaEventCreateWithFlags": (ctypes.POINTER(_HANDLE), ctypes.c_uint),
    "cudaEventRecord": (_HANDLE, _HANDLE),
    "cudaEventQuery": (_HANDLE,),
    "cudaEventSynchronize": (_HANDLE,),
    "cudaEventDestroy": (_HANDLE,),
    "cudaStreamWaitEvent": (_HANDLE, _HANDLE, ctypes.c_uint),
    "cudaMemcpyAsync": (_HANDLE, _HANDLE, ctypes.c_size_t, ctypes.c_int, _HANDLE),
    "cudaGetLastError": (),
}


class CudaEvent:
    """A recorded event. Its handle goes back to be recorded again when the last reference goes."""

    __slots__ = ("handle", "is_done", "_idle")

    def __init__(self, handle: int, idle: list[int]) -> None:
        self.handle = handle
        self.is_done = False  # as far as anybody has asked; then no call is needed any more
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
        self._record, self._wait, self._query, self._copy, self._last_error = hot_calls(self._library)
        self._idle: list[int] = []  # handles of events that nobody holds

    def record(self, stream: int) -> CudaEvent:
        """As `Device.record_event`: a new event after all work issued to `stream` so far."""
        event = CudaEvent(self._idle.pop() if self._idle else self._new_handle(), self._idle)
        if stream or self._is_current:
            self._check(self._record(event.handle, stream))
        else:
            with torch.cuda.device(self._device):
                self._check(self._record(event.handle, stream))
        return event

    def wait(self, stream: int, event: CudaEvent) -> None:
        """As `Device.wait_event`: work issued to `stream` from now on starts after `event`."""
        if event.is_done:
            return
        if stream or self._is_current:
            self._check(self._wait(stream, event.handle, 0))
        else:
            with torch.cuda.device(self._device):
                self._check(self._wait(stream, event.handle, 0))

    def is_complete(self, event: CudaEvent) -> bool:
        """As `Device.is_complete`: True if `event` has completed; never blocks."""
        if event.is_done:
            return True
        code = self._query(event.handle)
        if code == _NOT_READY:
            self._last_error()  # else torch's next check takes it for an error of its own
            return False
        self._check(code)
        event.is_done = True
        return True

    def synchronize(self, event: CudaEvent) -> None:
        """Block the host until `event` has completed, and let other threads run meanwhile."""
        self._check(self._library.cudaEventSynchronize(event.handle))

    def copy_out(self, stream: int, source: torch.Tensor, target: HostRegion) -> None:
        """As `Device.copy_out`; `target` is in a slab of pinned memory."""
        device = check_copy(source, target).data_ptr()
        self._check(self._copy(_address(target), device, target.nbytes, _DEVICE_TO_HOST, stream))

    def copy_in(self, stream: int, source: HostRegion, target: torch.Tensor) -> None:
        """As `Device.copy_in`; `source` is in a slab of pinned memory."""
        device = check_copy(target, source).data_ptr()
        self._check(self._copy(device, _address(source), source.nbytes, _HOST_TO_DEVICE, stream))

    def destroy_idle_events(self) -> None:
        """Give the handles of events that nobody holds back to CUDA."""
        while self._idle:
            self._library.cudaEventDestroy(self._idle.pop())

    @property
    def _is_current(self) -> bool:
        """The default stream has the handle 0 on every device, and means that of the current one."""
        return bool(torch._C._cuda_getDevice() == self._index)

    def _new_handle(self) -> int:
        handle = _HANDLE()
        with torch.cuda.device(self._device):  # an event belongs to the device that is current at its creation
            self._check(self._library.cudaEventCreateWithFlags(ctypes.byref(handle), _DISABLE_TIMING))
        assert handle.value is not None
        return handle.value

    def _check(self, code: int) -> None:
        if code != 0:
            self._last_error()
            runtime = torch.cuda.cudart()
            raise CopyError(f"CUDA error {code}: {runtime.cudaGetErrorString(runtime.cudaError(code))}")


def hot_calls(library: ctypes.CDLL) -> tuple[Callable[..., int], ...]:
    """The calls that each group makes: record, wait, query, copy and last error, of the runtime in `library`.

    Through our own extension module where the package was compiled, else through ctypes. Arguments are those of CUDA.
    """
    for name, arguments in _SIGNATURES.items():
        getattr(library, name).argtypes = arguments
        getattr(library, name).restype = ctypes.c_int
    events = (library.cudaEventRecord, library.cudaStreamWaitEvent, library.cudaEventQuery)
    functions = (*events, library.cudaMemcpyAsync, library.cudaGetLastError)
    try:
        from ._cuda_calls import Calls
    except ImportError:  # installed as pure Python
        return functions
    calls = Calls(*[ctypes.cast(function, _HANDLE).value or 0 for function in functions])
    return calls.record, calls.wait, calls.query, calls.copy, calls.last_error


def _load_library() -> ctypes.CDLL:
    """The runtime that torch itself uses: with another copy, streams and errors would not be the same ones."""
    process = ctypes.CDLL(None)
    if hasattr(process, "cudaMemcpyAsync"):
        return process
    major = (torch.version.cuda or "").partition(".")[0]
    return ctypes.CDLL(f"libcudart.so.{major}")  # loaded already: this only finds it


def _address(region: HostRegion) -> int:
    slab: Any = region.slab  # a `PinnedSlab`
    address: int = slab.address
    return address + region.offset
