# SPDX-License-Identifier: Apache-2.0
"""Finds the CUDA runtime that torch has loaded, and declares the calls that each group makes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

import torch

STREAM_ORDER: Final = 1  # cudaMemcpySrcAccessOrderStream
OVERLAP_WITH_COMPUTE: Final = 1  # cudaMemcpyFlagPreferOverlapWithCompute: by the copy engines, not the multiprocessors
# In CUDA 12 the function of that name has other parameters, which may change again: a wrong guess is a wild write.
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
    "cudaGetDevice": (ctypes.POINTER(ctypes.c_int),),
    "cudaSetDevice": (ctypes.c_int,),
    "cudaThreadExchangeStreamCaptureMode": (ctypes.POINTER(ctypes.c_int),),
    "cudaRuntimeGetVersion": (ctypes.POINTER(ctypes.c_int),),
}

RECORD, WAIT, COPY, BACKGROUND = 0, 1, 2, 3  # the codes of the calls of a routine
OTHER_DEVICE = -1  # none of CUDA's codes


class Routine(Protocol):
    """A sequence of calls, made by `Calls.routine`."""

    def run(self, compute: int, /) -> None:
        """Make the calls, with `compute` for a stream of 0, up to the first that fails."""


class Calls(Protocol):
    """The calls that each group makes; handles and results are integers, and each returns CUDA's error code.

    Calls of a routine may be made in the background, in the order of the runs. Each other call waits until they are
    made, and returns the first error of theirs in place of its own (`query`: of none). A routine's own calls wait for
    those that they need.
    """

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
        CUDA refuses it. One is not: it may be a part of a capture, which refuses it, too.
        """

    def routine(self, numbers: list[int], device: int, otherwise: Callable[[Routine, int], None], /) -> Routine:
        """Return a sequence of calls that are made at once.

        If one fails, `otherwise` is called with the sequence and CUDA's error code; if `compute` is the default stream,
        and the current device is not `device`, no call is made and the code is OTHER_DEVICE.

        Each is a code and its numbers: RECORD or WAIT, the stream (0: the argument of `Routine.run`) and the event; or
        COPY, the stream, the event after the copies, their kind and count, all targets, all sources and all sizes.
        BACKGROUND, a code alone, leaves all calls behind it to a thread, if there is one; their streams are not 0. An
        error of theirs is that of the next call.
        The copies are a batch if the runtime has that, also a single one, which takes the host less time so.
        """

    def settle(self) -> int:
        """Return when no call in the background is left to make."""

    def last_error(self) -> int:
        """Call cudaGetLastError."""


class CtypesRoutine:
    """Implements `Routine` through ctypes."""

    def __init__(
        self,
        calls: Sequence[Callable[[int], int]],
        is_elsewhere: Callable[[], int],
        otherwise: Callable[[Routine, int], None],
    ) -> None:
        self._calls = calls
        self._is_elsewhere = is_elsewhere
        self._otherwise = otherwise

    def run(self, compute: int, /) -> None:
        code = 0 if compute else self._is_elsewhere()
        for call in self._calls:
            code = code or call(compute)
        if code:
            self._otherwise(self, code)


class CtypesCalls:
    """Implements `Calls` through ctypes, for a package that is not compiled: each takes a microsecond more.

    It has no thread: one of Python's would hold up the others.
    """

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
        return self._prepared(stream, event, kind, copies[0::3], copies[1::3], copies[2::3], least_batch=2)()

    def routine(self, numbers: list[int], device: int, otherwise: Callable[[Routine, int], None], /) -> CtypesRoutine:
        calls: list[Callable[[int], int]] = []
        while numbers:
            call, numbers = self._first_of(numbers)
            calls.append(call)
        return CtypesRoutine(calls, partial(self._is_elsewhere, device), otherwise)

    def settle(self) -> int:
        return 0

    def _is_elsewhere(self, device: int) -> int:
        """Return OTHER_DEVICE if another device is current, else the code of the question."""
        current = ctypes.c_int()
        code: int = self._library.cudaGetDevice(ctypes.byref(current))
        return code or (0 if current.value == device else OTHER_DEVICE)

    def _first_of(self, numbers: list[int]) -> tuple[Callable[[int], int], list[int]]:
        """Return the first call of a routine, and the numbers of the remaining calls."""
        if numbers[0] == BACKGROUND:
            numbers = numbers[1:]
        code, stream, event, *rest = numbers
        if code == RECORD:
            return (lambda compute: self.record(event, stream or compute)), rest
        if code == WAIT:
            return (lambda compute: self.wait(stream or compute, event)), rest
        kind, count, *rest = rest
        targets, sources, sizes = (rest[i * count : (i + 1) * count] for i in range(3))
        copy = self._prepared(stream, event, kind, targets, sources, sizes, least_batch=1)
        return (lambda compute: copy()), rest[3 * count :]

    def _prepared(
        self,
        stream: int,
        event: int,
        kind: int,
        targets: list[int],
        sources: list[int],
        sizes: list[int],
        least_batch: int,
    ) -> Callable[[], int]:
        """Return a function that issues copies and records `event` after them."""
        if len(sizes) >= least_batch and stream and self._has_batch:
            copy = partial(self._library.cudaMemcpyBatchAsync, *_batch(stream, targets, sources, sizes))
        else:
            copy = partial(self._copy_each, stream, kind, list(zip(targets, sources, sizes, strict=True)))
        return lambda: copy() or self.record(event, stream)

    def _copy_each(self, stream: int, kind: int, copies: list[tuple[int, int, int]]) -> int:
        code = 0
        for copy in copies:
            code = code or self._copy(*copy, kind, stream)
        return code


def _batch(stream: int, targets: list[int], sources: list[int], sizes: list[int]) -> tuple[Any, ...]:
    """Return the arguments of cudaMemcpyBatchAsync."""
    count = len(sizes)
    return (
        (HANDLE * count)(*targets),
        (HANDLE * count)(*sources),
        (ctypes.c_size_t * count)(*sizes),
        ctypes.c_size_t(count),
        (ctypes.c_int * 6)(STREAM_ORDER, 0, 0, 0, 0, OVERLAP_WITH_COMPUTE),  # cudaMemcpyAttributes
        ctypes.pointer(ctypes.c_size_t(0)),  # the attributes apply to all copies from index 0 on
        ctypes.c_size_t(1),
        HANDLE(stream),
    )


def make_calls(library: Any) -> Calls:
    """Return the calls of the runtime in `library`: through our extension module, otherwise through ctypes."""
    try:
        from offload_engine._devices._cuda_calls import Calls as NativeCalls
    except ImportError:  # installed as pure Python
        return CtypesCalls(library)
    functions = [library.cudaEventRecord, library.cudaStreamWaitEvent, library.cudaEventQuery]
    functions += [library.cudaMemcpyAsync, library.cudaGetLastError, library.cudaGetDevice, library.cudaSetDevice]
    functions.append(library.cudaThreadExchangeStreamCaptureMode)
    if has_batch_copy(library):
        functions.append(library.cudaMemcpyBatchAsync)
    addresses = [ctypes.cast(function, HANDLE).value or 0 for function in functions]
    return NativeCalls(*(*addresses, 0)[:9])


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
