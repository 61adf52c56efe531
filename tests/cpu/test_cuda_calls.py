# SPDX-License-Identifier: Apache-2.0
"""Calls of the CUDA runtime, through ctypes and through our extension module, to a library that only takes notes."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from offload_engine import IS_COMPILED
from offload_engine._devices import cuda_calls
from offload_engine._devices.base import COMPUTE, CopyError, HostRegion
from offload_engine._devices.cuda_calls import Calls, CtypesCalls, declare, has_batch_copy, make_calls
from offload_engine._devices.cuda_routine import CudaRoutine
from offload_engine._devices.cuda_runtime import CudaEvent, CudaRuntime
from offload_engine._devices.host_read import MappedRead
from tests.lookups import present

SOURCE = Path(__file__).parents[2] / "offload_engine" / "_devices" / "_cuda_calls.c"
COMPILER = shutil.which("cc") or shutil.which("gcc")
HAS_HEADERS = (Path(sysconfig.get_path("include")) / "Python.h").exists()
pytestmark = pytest.mark.skipif(
    COMPILER is None or not HAS_HEADERS, reason="needs a C compiler (cc) and Python's headers (python3-dev)"
)

FAKE = """
#include <stddef.h>
#include <stdint.h>
uint64_t noted[6], copies[300], recorded[2], calls[8];
int result = 0, version = 13000, num_calls = 0, num_streams = 0;
int device = 0, last_flags = -1, num_events = 0, pending = 0, num_synchronized = 0, num_destroyed = 0;
static int note(uint64_t call, uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e)
{
    uint64_t values[6] = {call, a, b, c, d, e};
    for (int i = 0; i < 6; i++) noted[i] = values[i];
    calls[num_calls++ % 8] = call;
    return result;
}
int cudaEventRecord(void *event, void *stream)
{
    recorded[0] = (uint64_t)event, recorded[1] = (uint64_t)stream;
    calls[num_calls++ % 8] = 1;
    return result;
}
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags)
{
    return note(2, (uint64_t)stream, (uint64_t)event, flags, 0, 0);
}
int cudaEventQuery(void *event)
{
    int code = note(3, (uint64_t)event, 0, 0, 0, 0);
    return pending > 0 ? pending--, 600 : code;
}
int cudaMemcpyAsync(void *to, const void *from, size_t nbytes, int kind, void *stream)
{
    return note(4, (uint64_t)to, (uint64_t)from, nbytes, (uint64_t)kind, (uint64_t)stream);
}
int cudaStreamCreateWithFlags(void **stream, unsigned flags)
{
    *stream = (void *)(0x1000 * (uint64_t)++num_streams);
    return note(7, flags, 0, 0, 0, 0);
}
int cudaStreamSynchronize(void *stream) { return note(8, (uint64_t)stream, 0, 0, 0, 0); }
int cudaStreamDestroy(void *stream) { num_streams--; return note(9, (uint64_t)stream, 0, 0, 0, 0); }
int cudaEventCreateWithFlags(void **event, unsigned flags)
{
    *event = (void *)(0x100000 + 0x100 * (uint64_t)++num_events);
    last_flags = (int)flags;
    return 0;
}
int cudaEventSynchronize(void *event) { num_synchronized++; return 0; }
int cudaEventDestroy(void *event) { num_destroyed++; return 0; }
int cudaEventElapsedTime(float *milliseconds, void *first, void *last)
{
    *milliseconds = 1.5f;
    return note(10, (uint64_t)first, (uint64_t)last, 0, 0, 0);
}
int cudaHostGetDevicePointer(void **found, void *host, unsigned flags)
{
    *found = (char *)host + 64;
    return note(11, (uint64_t)host, flags, 0, 0, 0);
}
int cudaGetLastError(void) { return note(5, 0, 0, 0, 0, 0); }
int cudaGetDevice(int *found) { *found = device; return result; }
int cudaRuntimeGetVersion(int *found) { *found = version; return 0; }
#ifndef WITHOUT_BATCH
int cudaMemcpyBatchAsync(void *const *to, const void *const *from, const size_t *sizes, size_t count,
                         const int *attributes, const size_t *first, size_t num_attributes, void *stream)
{
    uint64_t hints = 0;
    for (size_t i = 0; i < count && i < 100; i++) {
        copies[3 * i] = (uint64_t)to[i];
        copies[3 * i + 1] = (uint64_t)from[i];
        copies[3 * i + 2] = sizes[i];
    }
    for (int i = 1; i < 5; i++) hints |= attributes[i] != 0;
    return note(6, count, (uint64_t)stream, attributes[0] << 8 | attributes[5], hints, *first << 8 | num_attributes);
}
#endif
"""
# As on a GPU: addresses beyond 2^47, a copy beyond 2^32, and 0 for the default stream.
EVENT, STREAM, DEVICE, HOST, NBYTES = 0x7F00_1234_5678, 0x55AA_0000_1000, 0x7FFF_F000_0200, 0x7F12_0000_0000, 5 << 32
LEADER, KIND = 0x55AA_0000_2000, 2
# Name, arguments, the last call that is not a record as the library noted it, event and stream of the last record.
CALLS = [
    ("record", (EVENT, STREAM), None, (EVENT, STREAM)),
    ("record", (EVENT, 0), None, (EVENT, 0)),
    ("wait", (STREAM, EVENT), (2, STREAM, EVENT, 0, 0, 0), None),
    ("wait", (0, EVENT), (2, 0, EVENT, 0, 0, 0), None),
    ("wait_stream", (STREAM, EVENT, LEADER), (2, STREAM, EVENT, 0, 0, 0), (EVENT, LEADER)),
    ("query", (EVENT,), (3, EVENT, 0, 0, 0, 0), None),
    ("copy_all", (STREAM, EVENT, 2, [HOST, DEVICE, NBYTES]), (4, HOST, DEVICE, NBYTES, 2, STREAM), (EVENT, STREAM)),
    ("copy_all", (0, EVENT, 1, [DEVICE, HOST, 1]), (4, DEVICE, HOST, 1, 1, 0), (EVENT, 0)),
    ("last_error", (), (5, 0, 0, 0, 0, 0), None),
    # One attribute for all copies from the first on: sources are read in the order of the stream, beside kernels.
    (
        "copy_all",
        (STREAM, EVENT, KIND, [HOST, DEVICE, NBYTES, HOST + 512, DEVICE + 512, 1]),
        (6, 2, STREAM, 1 << 8 | 1, 0, 1),
        (EVENT, STREAM),
    ),
]
RECORD, WAIT, COPY, BATCH = 1, 2, 4, 6
SYMBOLS = "EventRecord StreamWaitEvent EventQuery MemcpyAsync GetLastError GetDevice MemcpyBatchAsync".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("built")


@pytest.fixture(scope="module")
def runtime(folder: Path) -> ctypes.CDLL:
    (folder / "fake.c").write_text(FAKE)
    return ctypes.CDLL(str(compile_library(folder / "fake.c", folder / "libfake.so")))


@pytest.fixture(scope="module")
def extension(folder: Path) -> Any:
    """Return the extension module, built from the source of this checkout, whatever is installed."""
    path = compile_library(SOURCE, folder / "_cuda_calls.so")
    loader = importlib.machinery.ExtensionFileLoader("_cuda_calls", str(path))
    module = importlib.util.module_from_spec(present(importlib.util.spec_from_loader("_cuda_calls", loader)))
    loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Create events on the device of the runtime, and tell what it says to error codes."""
    cudart = SimpleNamespace(cudaError=int, cudaGetErrorString=lambda code: f"reason {code}")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)


@pytest.fixture(params=["ctypes", "extension module"])
def calls(request: pytest.FixtureRequest, runtime: ctypes.CDLL, extension: Any) -> Calls:
    return made(runtime, None if request.param == "ctypes" else extension)


def made(runtime: ctypes.CDLL, extension: Any) -> Calls:
    """Return the calls through an extension module; None: through ctypes."""
    declare(runtime)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "offload_engine._devices._cuda_calls", extension)
        return make_calls(runtime)


def compile_library(source: Path, target: Path, *more: str) -> Path:
    assert COMPILER is not None
    flags = "-shared -fPIC -Wall -Wextra -Werror -Wno-unused-parameter -Wno-missing-field-initializers".split()
    command = [COMPILER, *flags, *more, f"-I{sysconfig.get_path('include')}", str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    return target


def addresses(runtime: ctypes.CDLL) -> list[int | None]:
    return [ctypes.cast(getattr(runtime, f"cuda{symbol}"), ctypes.c_void_p).value for symbol in SYMBOLS]


def number(runtime: ctypes.CDLL, name: str) -> ctypes.c_int:
    return ctypes.c_int.in_dll(runtime, name)


@contextmanager
def having(runtime: ctypes.CDLL, name: str, value: int) -> Iterator[None]:
    found = number(runtime, name)
    before, found.value = found.value, value
    try:
        yield
    finally:
        found.value = before


@pytest.mark.parametrize(("name", "arguments", "noted", "recorded"), CALLS)
def test_arguments_arrive_and_nothing_is_issued_after_an_error(
    name: str,
    arguments: tuple[Any, ...],
    noted: tuple[int, ...] | None,
    recorded: tuple[int, int] | None,
    calls: Calls,
    runtime: ctypes.CDLL,
) -> None:
    with having(runtime, "result", 600), having(runtime, "num_calls", 0):
        assert getattr(calls, name)(*arguments) == 600
        assert number(runtime, "num_calls").value == 1
    with having(runtime, "num_calls", 0):
        assert getattr(calls, name)(*arguments) == 0
        assert number(runtime, "num_calls").value == (noted is not None) + (recorded is not None)
    assert noted in (None, last_call(runtime)) and recorded in (None, last_record(runtime))


@pytest.mark.parametrize("count", [1, 2, 64, 65, 100])  # the extension module keeps 64 on its stack
@pytest.mark.parametrize("stream", [STREAM, 0])
def test_each_copy_arrives_and_the_event_is_recorded_last(
    count: int, stream: int, calls: Calls, runtime: ctypes.CDLL
) -> None:
    copies = [(HOST + 512 * i, DEVICE + 1024 * i, NBYTES + i) for i in range(count)]
    values = [value for copy in copies for value in copy]
    with having(runtime, "num_calls", 0):
        assert calls.copy_all(stream, EVENT, KIND, values) == 0
        is_batch = count > 1 and stream != 0  # CUDA refuses a batch on the default stream
        assert number(runtime, "num_calls").value == (1 if is_batch else count) + 1
        if count <= 2:
            assert order_of_calls(runtime)[-1] == RECORD
    if is_batch:
        assert last_call(runtime)[:3] == (BATCH, count, STREAM)
        assert last_batch(runtime) == copies
    else:
        assert last_call(runtime) == (COPY, *copies[-1], KIND, stream)


@pytest.mark.parametrize(
    ("numbers", "noted", "recorded"),
    [
        ([cuda_calls.RECORD, STREAM, EVENT], None, (EVENT, STREAM)),
        ([cuda_calls.RECORD, 0, EVENT], None, (EVENT, LEADER)),
        ([cuda_calls.WAIT, STREAM, EVENT], (WAIT, STREAM, EVENT, 0, 0, 0), None),
        ([cuda_calls.WAIT, 0, EVENT], (WAIT, LEADER, EVENT, 0, 0, 0), None),
        (  # a batch: a routine is never captured
            [cuda_calls.COPY, STREAM, EVENT, KIND, 1, HOST, DEVICE, NBYTES],
            (BATCH, 1, STREAM, 1 << 8 | 1, 0, 1),
            (EVENT, STREAM),
        ),
    ],
)
def test_each_call_of_a_routine_arrives_whenever_it_runs(
    numbers: list[int],
    noted: tuple[int, ...] | None,
    recorded: tuple[int, int] | None,
    calls: Calls,
    runtime: ctypes.CDLL,
) -> None:
    routine = calls.routine(numbers, 0, refuse)
    for _ in range(2):
        calls.record(1, 2)
        calls.query(3)
        routine.run(LEADER)
        assert last_call(runtime) == (noted or (3, 3, 0, 0, 0, 0))
        assert last_record(runtime) == (recorded or (1, 2))


def refuse(routine: cuda_calls.Routine, code: int) -> None:
    pytest.fail(f"error {code}")


def test_a_routine_makes_its_calls_in_their_order_up_to_an_error(calls: Calls, runtime: ctypes.CDLL) -> None:
    copies = [HOST, HOST + 512, DEVICE, DEVICE + 1024, NBYTES, 1]
    numbers = [cuda_calls.RECORD, 0, EVENT, cuda_calls.WAIT, STREAM, EVENT]
    numbers += [cuda_calls.COPY, STREAM, EVENT, KIND, 2, *copies, cuda_calls.WAIT, 0, EVENT]
    failed: list[tuple[cuda_calls.Routine, int]] = []
    routine = calls.routine(numbers, 0, lambda *args: failed.append(args))
    for _ in range(2):
        with having(runtime, "num_calls", 0):
            routine.run(LEADER)
            assert order_of_calls(runtime) == [RECORD, WAIT, BATCH, RECORD, WAIT] and not failed
            assert last_batch(runtime, 2) == [(HOST, DEVICE, NBYTES), (HOST + 512, DEVICE + 1024, 1)]
        with having(runtime, "num_calls", 0), having(runtime, "result", 700):
            routine.run(LEADER)
            assert order_of_calls(runtime) == [RECORD]
            assert failed.pop() == (routine, 700)
            with pytest.raises(pytest.fail.Exception, match="error 700"):  # what it raises for its code is raised
                calls.routine(numbers, 0, refuse).run(LEADER)
    with having(runtime, "num_calls", 0):
        calls.routine([], 0, refuse).run(LEADER)
        assert number(runtime, "num_calls").value == 0


def test_a_routine_makes_no_call_on_the_default_stream_of_another_device(calls: Calls, runtime: ctypes.CDLL) -> None:
    failed: list[tuple[cuda_calls.Routine, int]] = []
    routine = calls.routine([cuda_calls.RECORD, 0, EVENT], 1, lambda *args: failed.append(args))
    with having(runtime, "num_calls", 0):
        routine.run(0)
        assert number(runtime, "num_calls").value == 0 and failed == [(routine, cuda_calls.OTHER_DEVICE)]
        with having(runtime, "result", 700):
            routine.run(0)
        assert number(runtime, "num_calls").value == 0 and failed[1:] == [(routine, 700)]
        routine.run(LEADER)
        with having(runtime, "device", 1):
            routine.run(0)
        assert number(runtime, "num_calls").value == 2 and len(failed) == 2
    assert last_record(runtime) == (EVENT, 0)


def test_what_is_no_routine_and_no_argument_is_refused(extension: Any, runtime: ctypes.CDLL) -> None:
    native = extension.Calls(*addresses(runtime))
    copy = [cuda_calls.COPY, STREAM, EVENT, KIND]
    for wrong in (
        *([cuda_calls.RECORD, STREAM], [3, STREAM, EVENT], [cuda_calls.WAIT, STREAM, EVENT, 0]),
        *(copy, [*copy, 0], [*copy, 2, HOST, DEVICE, 1], [*copy, 1 << 63, HOST, DEVICE, 1]),
        [cuda_calls.COPY, 0, EVENT, KIND, 1, HOST, DEVICE, 1],  # copies are never on the compute stream
    ):
        with pytest.raises(ValueError, match="whole calls"):
            native.routine(wrong, 0, refuse)
    routine = native.routine([cuda_calls.RECORD, STREAM, EVENT], 0, refuse)
    lists: tuple[Any, ...] = ([], [HOST], [HOST, HOST, DEVICE, DEVICE, 1], (HOST, DEVICE, 1), HOST)
    for call, *arguments in (
        (native.routine, (cuda_calls.WAIT, STREAM, EVENT), 0, refuse),
        (native.routine, [cuda_calls.WAIT, STREAM, "event"], 0, refuse),
        (native.routine, [cuda_calls.WAIT, STREAM, EVENT]),
        (routine.run, "stream"),
        (type(routine),),
        (native.record, EVENT),
        (native.query, "event"),
        (native.wait_stream, STREAM, EVENT),
        (native.copy_all,),
        (native.copy_all, STREAM, EVENT, KIND),
        *((native.copy_all, STREAM, EVENT, KIND, each) for each in lists),
        *((native.copy_all, STREAM, EVENT, KIND, [*(3 * n - 1) * [1], "size"]) for n in (1, 100)),
    ):
        with pytest.raises(TypeError):
            call(*arguments)
    with pytest.raises(OverflowError):
        native.wait(-1, EVENT)
    with pytest.raises(ValueError, match="six functions"):
        extension.Calls(1, 2, 3, 4, 5, 0, 7)
    del native
    with having(runtime, "num_calls", 0):
        routine.run(0)
        assert order_of_calls(runtime) == [RECORD]


def test_the_compiled_package_does_not_call_through_ctypes(runtime: ctypes.CDLL) -> None:
    assert isinstance(make_calls(runtime), CtypesCalls) != IS_COMPILED


@pytest.mark.parametrize(
    ("version", "has_batch"), [(12090, False), (13000, True), (13990, True), (14000, False), (None, False)]
)
def test_a_batch_is_for_runtimes_that_have_it_and_whose_arguments_are_known(
    version: int | None, has_batch: bool, extension: Any, runtime: ctypes.CDLL, folder: Path
) -> None:
    """With other arguments the call would be a wild write."""
    library = runtime
    if version is None:
        library = ctypes.CDLL(str(compile_library(folder / "fake.c", folder / "libwithout.so", "-DWITHOUT_BATCH")))
    with having(library, "version", version or 13000):
        assert has_batch_copy(library) == has_batch
        for module in (None, extension):
            calls = made(library, module)
            assert isinstance(calls, CtypesCalls) == (module is None)
            assert calls.copy_all(STREAM, EVENT, KIND, [HOST, DEVICE, 1, HOST + 512, DEVICE + 512, 2]) == 0
            if has_batch:
                assert last_call(library)[0] == BATCH
            else:  # each copy is a call
                assert last_call(library) == (COPY, HOST + 512, DEVICE + 512, 2, KIND, STREAM)


# ---- the class around them ----


class Slab:
    address, nbytes = HOST, 8192

    def close(self) -> None: ...


def last_call(runtime: ctypes.CDLL) -> tuple[int, ...]:
    return tuple((ctypes.c_uint64 * 6).in_dll(runtime, "noted"))


def last_record(runtime: ctypes.CDLL) -> tuple[int, ...]:
    """Return event and stream."""
    return tuple((ctypes.c_uint64 * 2).in_dll(runtime, "recorded"))


def order_of_calls(runtime: ctypes.CDLL) -> list[int]:
    """Return the calls since `num_calls` was zero, at most eight."""
    return list((ctypes.c_uint64 * 8).in_dll(runtime, "calls"))[: number(runtime, "num_calls").value]


def last_batch(runtime: ctypes.CDLL, count: int | None = None) -> list[tuple[int, int, int]]:
    """Return target, source and size of each copy; None: as many as the last call, of a batch, has."""
    values = iter((ctypes.c_uint64 * (3 * (count or last_call(runtime)[1]))).in_dll(runtime, "copies"))
    return list(zip(values, values, values, strict=True))


def three_copies() -> list[tuple[torch.Tensor, HostRegion]]:
    return [(torch.zeros(n, dtype=torch.uint8), HostRegion(Slab(), 512 * n, n)) for n in (1, 2, 3)]


@pytest.fixture
def cuda(runtime: ctypes.CDLL) -> CudaRuntime:
    return CudaRuntime(torch.device("cuda", 0), runtime)


def backwards(copies: list[tuple[torch.Tensor, HostRegion]]) -> list[tuple[HostRegion, torch.Tensor]]:
    return [(region, tensor) for tensor, region in copies]


def test_copies_are_of_whole_storages_and_several_with_their_event_are_two_calls(
    cuda: CudaRuntime, runtime: ctypes.CDLL
) -> None:
    storage = torch.zeros(16, 16)
    cuda.copy_out(STREAM, [(storage.t()[2:], HostRegion(Slab(), 512, 1024))])
    assert last_call(runtime) == (4, HOST + 512, storage.data_ptr(), 1024, 2, STREAM)
    for wrong in (HostRegion(Slab(), 0, 1023), HostRegion(Slab(), 7680, 1024)):
        with pytest.raises(ValueError, match="bytes"):
            cuda.copy_out(STREAM, [(storage, wrong)])
    copies = three_copies()
    with having(runtime, "num_calls", 0):
        copied_out = cuda.copy_out(STREAM, copies)
        assert last_call(runtime) == (6, 3, STREAM, 1 << 8 | 1, 0, 1)
        assert last_batch(runtime) == [(HOST + 512 * t.nbytes, t.data_ptr(), t.nbytes) for t, _ in copies]
        assert last_record(runtime) == (copied_out.handle, STREAM)
        copied_in = cuda.copy_in(STREAM, backwards(copies))
        assert last_batch(runtime) == [(t.data_ptr(), HOST + 512 * t.nbytes, t.nbytes) for t, _ in copies]
        assert last_record(runtime) == (copied_in.handle, STREAM) and copied_in.handle != copied_out.handle
        assert order_of_calls(runtime) == [BATCH, RECORD, BATCH, RECORD]
    for some in (copies[:1], copies):
        for copy in (lambda: cuda.copy_out(STREAM, some), lambda: cuda.copy_in(STREAM, backwards(some))):  # noqa: B023
            with having(runtime, "result", 1), pytest.raises(CopyError, match="CUDA error 1: reason 1"):
                copy()


@pytest.fixture
def routine(cuda: CudaRuntime) -> CudaRoutine:
    return CudaRoutine(cuda, torch.device("cuda", 0))


def test_a_routine_records_the_same_events_each_time(
    cuda: CudaRuntime, routine: CudaRoutine, runtime: ctypes.CDLL
) -> None:
    copies = three_copies()
    ran = routine.record_event(COMPUTE)
    routine.wait_event(STREAM, ran)
    copied_out = routine.copy_out(STREAM, copies)
    copied_in = routine.copy_in(STREAM, backwards(copies[:1]))
    run = routine.finish()
    with having(runtime, "num_calls", 0):
        for _ in range(2):
            number(runtime, "num_calls").value = 0
            run(LEADER)
            assert order_of_calls(runtime) == [RECORD, WAIT, BATCH, RECORD, BATCH, RECORD]
            assert last_record(runtime) == (copied_in.handle, STREAM)
            (tensor, region), *others = copies
            out = [(HOST + 512 * t.nbytes, t.data_ptr(), t.nbytes) for t, _ in others]
            assert last_batch(runtime, 3) == [(tensor.data_ptr(), HOST + region.offset, 1), *out]
    assert len({ran.handle, copied_out.handle, copied_in.handle}) == 3
    with having(runtime, "result", 1), pytest.raises(CopyError, match="CUDA error 1: reason 1"):
        run(LEADER)
    run(LEADER)


def test_another_routine_keeps_the_event_that_it_waits_for(cuda: CudaRuntime, runtime: ctypes.CDLL) -> None:
    routine, other = (CudaRoutine(cuda, torch.device("cuda", 0)) for _ in range(2))
    ran = routine.record_event(STREAM)
    handle = ran.handle
    other.wait_event(COMPUTE, ran)
    run = other.finish()
    del routine, ran, other
    assert cuda.unrecorded().handle != handle
    run(LEADER)
    assert last_call(runtime) == (WAIT, LEADER, handle, 0, 0, 0)
    del run
    assert cuda.unrecorded().handle == handle


def test_a_routine_on_the_default_stream_is_on_that_of_its_device(routine: CudaRoutine, runtime: ctypes.CDLL) -> None:
    entered: list[torch.device] = []

    @contextmanager
    def entering(device: torch.device) -> Iterator[None]:
        entered.append(device)
        with having(runtime, "device", 0):
            yield

    event = routine.record_event(COMPUTE)
    run = routine.finish()
    with mock.patch.object(torch.cuda, "device", entering):
        run(0)
        assert not entered and last_record(runtime) == (event.handle, 0)
        with having(runtime, "device", 1):
            run(LEADER)
            assert not entered and last_record(runtime) == (event.handle, LEADER)
            run(0)
    assert entered == [torch.device("cuda", 0)] and last_record(runtime) == (event.handle, 0)


def test_in_a_capture_each_copy_is_a_call_and_no_event_is_asked(cuda: CudaRuntime, runtime: ctypes.CDLL) -> None:
    copies = three_copies()
    last, region = copies[-1]
    cuda.record_graph(True)
    with having(runtime, "num_calls", 0):
        event = cuda.copy_out(STREAM, copies)
        assert last_call(runtime) == (4, HOST + region.offset, last.data_ptr(), 3, 2, STREAM)
        assert last_record(runtime) == (event.handle, STREAM)
        assert BATCH not in order_of_calls(runtime)
    with having(runtime, "num_calls", 0), having(runtime, "num_synchronized", 0):
        assert not cuda.is_complete(event)
        cuda.synchronize(event)
        assert number(runtime, "num_calls").value == number(runtime, "num_synchronized").value == 0
        cuda.record_graph(False)
        assert cuda.is_complete(event)
        cuda.synchronize(event)
        assert number(runtime, "num_calls").value == number(runtime, "num_synchronized").value == 1


def test_streams_are_its_own_until_it_closes(cuda: CudaRuntime, runtime: ctypes.CDLL) -> None:
    streams = [cuda.new_stream(), cuda.new_stream()]
    assert last_call(runtime)[:2] == (7, 1), "they must not wait for the default stream"
    assert streams == [0x1000, 0x2000]
    cuda.finish()
    assert last_call(runtime)[:2] == (8, streams[-1])
    with having(runtime, "num_calls", 0):
        cuda.close()
        cuda.close()
        assert number(runtime, "num_calls").value == 2
    assert last_call(runtime)[:2] == (9, streams[0]) and number(runtime, "num_streams").value == 0


def test_an_event_is_asked_until_it_is_done_and_reused(cuda: CudaRuntime, runtime: ctypes.CDLL) -> None:
    """A failed one is not complete and raises for its waiter, as on the CPU device."""
    idle = [EVENT]
    event = CudaEvent(idle.pop(), idle)
    for code, asks in ((600, (cuda.is_complete, cuda.poll)), (700, (cuda.is_complete,) * 2)):  # 600: not ready
        with having(runtime, "result", code):
            for ask in asks:
                assert not ask(event)
                assert last_call(runtime)[0] == 5, "torch would take the answer for an error of its own"
    with having(runtime, "result", 700):
        with pytest.raises(CopyError, match="CUDA error 700: reason 700"):
            cuda.wait(STREAM, event)
        with pytest.raises(CopyError, match="CUDA error 700: reason 700"):
            cuda.poll(event)
    cuda.wait(STREAM, event)
    assert last_call(runtime) == (2, STREAM, EVENT, 0, 0, 0)
    assert cuda.poll(event) and cuda.is_complete(event) and event.is_done
    assert last_call(runtime) == (3, EVENT, 0, 0, 0, 0)
    cuda.wait(STREAM + 1, event)
    assert last_call(runtime)[0] == 3, "a wait for what is done is a call in vain"
    del event
    assert idle == [EVENT]


def test_other_threads_run_while_one_waits_for_a_small_read(cuda: CudaRuntime, runtime: ctypes.CDLL) -> None:
    """Compiled or not: neither the loop nor the question lets go of the interpreter by itself."""
    event = CudaEvent(EVENT, [])
    read, done = MappedRead(torch.zeros(1), event, cuda), threading.Event()
    number(runtime, "result").value = 600
    waiting = threading.Thread(target=lambda: [call() for call in (read.wait, done.set)], daemon=True)
    waiting.start()
    try:
        assert not done.wait(0.05)
    finally:
        number(runtime, "result").value = 0
    waiting.join(10)
    assert done.is_set() and event.is_done


def test_where_kernels_find_host_memory(cuda: CudaRuntime, runtime: ctypes.CDLL) -> None:
    assert cuda.device_address(HOST) == HOST + 64 and last_call(runtime)[:3] == (11, HOST, 0)
    with having(runtime, "result", 1):
        assert cuda.device_address(HOST) is None
    assert last_call(runtime)[0] == 5, "torch would take it for an error of its own"
