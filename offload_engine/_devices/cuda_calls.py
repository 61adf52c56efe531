# SPDX-License-Identifier: Apache-2.0
"""The CUDA runtime that torch has loaded, and the calls that each group makes of it."""

from __future__ import annotations

import ctypes
from typing import Any, Final, Protocol

import torch

STREAM_ORDER: Final = 1  # cudaMemcpySrcAccessOrderStream
OVERLAP_WITH_COMPUTE: Final = 1  # cudaMemcpyFlagPreferOverlapWithCompute: by the copy engines, not the multiprocessors
# In CUDA 12 the function of that name takes other arguments, and so it may again: a wrong guess is a wild write.
BATCH_VERSIONS: Final = range(13000, 14000)

HANDLE = ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cudaStreamCreateWithFlags": (ctypes.POINTER(HANDLE), ctypes.c_uint),
    "cudaStreamSynchronize": (HANDLE,),
    "cudaStreamDestroy": (HANDLE,),
    "cudaEventCreateWithFlags": (ctypes.POINTER(HANDLE), ctypes.c_uint),
    "cudaEventRecord": (HANDLE, HANDLE),
    "cudaEventQuery": (HANDLE,),
    "cudaEventSynchronize": (HANDLE,),
    "cudaEventDestroy": (HANDLE,),
    "cudaEventElapsedTime": (ctypes.POINTER(ctypes.c_float), HANDLE, HANDLE),
    "cudaStreamWaitEvent": (HANDLE, HANDLE, ctypes.c_uint),
    "cudaHostGetDevicePointer": (ctypes.POINTER(HANDLE), HANDLE, ctypes.c_uint),
    "cudaMemcpyAsync": (HANDLE, HANDLE, ctypes.c_size_t, ctypes.c_int, HANDLE),
    "cudaGetLastError": (),
    "cudaRuntimeGetVersion": (ctypes.POINTER(ctypes.c_int),),
}


class Calls(Protocol):
    """The calls that each group makes; handles and results are integers, and each returns CUDA's error code."""

    def record(self, event: int, stream: int, /) -> int:
        """Call cudaEventRecord."""

    def wait(self, stream: int, event: int, /) -> int:
        """Call cudaStreamWaitEvent."""

    def wait_stream(self, stream: int, event: int, leader: int, /) -> int:
        """Record `event` on `leader` and make `stream` wait for it; afterwards the event is free."""

    def query(self, event: int, /) -> int:
        """Call cudaEventQuery."""

    def copy_all(self, stream: int, event: int, kind: int, copies: list[int], /) -> int:
        """Issue copies and record `event` after them; `copies` are target, source and size in bytes of each.

        Several copies are one cudaMemcpyBatchAsync where the runtime has that, except on the default stream, for which
        CUDA refuses it.
        """

    def last_error(self) -> int:
        """Call cudaGetLastError."""


class CtypesCalls:
    """`Calls` through ctypes, for a package that is not compiled: each takes a microsecond more."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._has_batch = has_batch_copy(library)
        # Bound once: an attribute look-up in the library costs as much as the call.
        self.record, self.query = library.cudaEventRecord, library.cudaEventQuery
        self.last_error = library.cudaGetLastError
        self._wait, self._copy = library.cudaStreamWaitEvent, library.cudaMemcpyAsync

    def wait(self, stream: int, event: int, /) -> int:
        code: int = self._wait(stream, event, 0)
        return code

    def wait_stream(self, stream: int, event: int, leader: int, /) -> int:
        return self.record(event, leader) or self.wait(stream, event)

    def copy_all(self, stream: int, event: int, kind: int, copies: list[int], /) -> int:
        count = len(copies) // 3
        if count > 1 and stream and self._has_batch:
            code = self._copy_batch(stream, count, copies)
        else:
            code = self._copy_each(stream, kind, count, copies)
        return code or self.record(event, stream)

    def _copy_each(self, stream: int, kind: int, count: int, values: list[int]) -> int:
        code = 0
        for i in range(count):
            code = code or self._copy(*values[3 * i : 3 * i + 3], kind, stream)
        return code

    def _copy_batch(self, stream: int, count: int, values: list[int]) -> int:
        addresses, sizes = HANDLE * count, ctypes.c_size_t * count
        attributes = (ctypes.c_int * 6)(STREAM_ORDER, 0, 0, 0, 0, OVERLAP_WITH_COMPUTE)  # cudaMemcpyAttributes
        code: int = self._library.cudaMemcpyBatchAsync(
            addresses(*values[0::3]),
            addresses(*values[1::3]),
            sizes(*values[2::3]),
            ctypes.c_size_t(count),
            attributes,
            ctypes.byref(ctypes.c_size_t(0)),  # they are those of all copies from the first on
            ctypes.c_size_t(1),
            HANDLE(stream),
        )
        return code


def make_calls(library: Any) -> Calls:
    """Return the calls of the runtime in `library`: through our extension module, else through ctypes."""
    try:
        from offload_engine._devices._cuda_calls import Calls as NativeCalls
    except ImportError:  # installed as pure Python
        return CtypesCalls(library)
    functions = [library.cudaEventRecord, library.cudaStreamWaitEvent, library.cudaEventQuery]
    functions += [library.cudaMemcpyAsync, library.cudaGetLastError]
    if has_batch_copy(library):
        functions.append(library.cudaMemcpyBatchAsync)
    addresses = [ctypes.cast(function, HANDLE).value or 0 for function in functions]
    record, wait, query, copy, last_error, copy_batch = (*addresses, 0)[:6]
    return NativeCalls(record, wait, query, copy, last_error, copy_batch)


def has_batch_copy(library: Any) -> bool:
    """Return whether the runtime in `library` has `cudaMemcpyBatchAsync`, with the arguments of CUDA 13."""
    version = ctypes.c_int()
    code: int = library.cudaRuntimeGetVersion(ctypes.byref(version))
    return code == 0 and version.value in BATCH_VERSIONS and hasattr(library, "cudaMemcpyBatchAsync")


def load_runtime() -> ctypes.CDLL:
    """Load the runtime that torch itself uses: another copy would have other streams and errors."""
    process = ctypes.CDLL(None)
    if hasattr(process, "cudaMemcpyAsync"):
        return process
    major = (torch.version.cuda or "").partition(".")[0]
    return ctypes.CDLL(f"libcudart.so.{major}")  # loaded already: this only finds it


def declare(library: Any) -> None:
    """Declare arguments and results of the functions of the runtime in `library`."""
    for name, arguments in _SIGNATURES.items():
        getattr(library, name).argtypes = arguments
        getattr(library, name).restype = ctypes.c_int
