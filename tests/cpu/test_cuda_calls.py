# SPDX-License-Identifier: Apache-2.0
"""Calls of the CUDA runtime, through ctypes and through our extension module, to a library that only takes notes."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from offload_engine import IS_COMPILED
from offload_engine._devices import cuda_calls
from offload_engine._devices.base import COMPUTE, CopyError, HostRegion
from offload_engine._devices.cuda_calls import CtypesCalls, declare, has_batch_copy, make_calls
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

FAKE = Path(__file__).parents[1] / "artifacts" / "fake_cuda.c"
# As on a GPU: addresses beyond 2^47, a copy beyond 2^32, and 0 for the default stream.
EVENT, STREAM, DEVICE, HOST, NBYTES = 0x7F00_1234_5678, 0x55AA_0000_1000, 0x7FFF_F000_0200, 0x7F12_0000_0000, 5 << 32
LEADER, KIND = 0x55AA_0000_2000, 2
RECORD, WAIT, QUERY, COPY, LAST_ERROR, BATCH, COPIED, SET_DEVICE, CAPTURE_MODE = 1, 2, 3, 4, 5, 6, 12, 13, 14
# One attribute for all copies from the first on: sources are read in the order of the stream, beside kernels.
ATTRIBUTES = 1 << 8 | 1, 0, 1
NOT_READY = 600
SYMBOLS = (
    "EventRecord StreamWaitEvent EventQuery MemcpyAsync GetLastError GetDevice SetDevice "
    "ThreadExchangeStreamCaptureMode MemcpyBatchAsync"
).split()
Noted = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("built")


@pytest.fixture(scope="module")
def runtime(folder: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(compile_library(FAKE, folder / "libfake.so")))


@pytest.fixture(scope="module")
def extension(folder: Path) -> Any:
    """Return the extension module, built from the source of this checkout, whatever is installed."""
    path = compile_library(SOURCE, folder / "_cuda_calls.so")
    loader = importlib.machinery.ExtensionFileLoader("_cuda_calls", str(path))
    module = importlib.util.module_from_spec(present(importlib.util.spec_from_loader("_cuda_calls", loader)))
    loader.exec_module(module)
    return module


@pytest.fixture(params=["ctypes", "extension module"])
def cuda(
    request: pytest.FixtureRequest, runtime: ctypes.CDLL, extension: Any, monkeypatch: pytest.MonkeyPatch
) -> CudaRuntime:
    cudart = SimpleNamespace(cudaError=int, cudaGetErrorString=lambda code: f"reason {code}")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)  # events are created on the device of the runtime
    module = None if request.param == "ctypes" else extension
    monkeypatch.setitem(sys.modules, "offload_engine._devices._cuda_calls", module)
    found = CudaRuntime(torch.device("cuda", 0), runtime)
    assert isinstance(found.calls, CtypesCalls) == (module is None)
    noted(runtime)
    return found


@pytest.fixture
def routine(cuda: CudaRuntime) -> CudaRoutine:
    return CudaRoutine(cuda, torch.device("cuda", 0))


def compile_library(source: Path, target: Path, *more: str) -> Path:
    assert COMPILER is not None
    flags = "-shared -fPIC -Wall -Wextra -Werror -Wno-unused-parameter -Wno-missing-field-initializers".split()
    command = [COMPILER, *flags, *more, f"-I{sysconfig.get_path('include')}", str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    return target


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


def noted(runtime: ctypes.CDLL) -> Noted:
    """Return the calls since this was asked last, each with its arguments; copies of a batch come before it."""
    count = number(runtime, "num_noted")
    entries = ((ctypes.c_uint64 * 6) * 256).in_dll(runtime, "noted")
    num_arguments = {RECORD: 2, WAIT: 3, QUERY: 1, LAST_ERROR: 0, COPIED: 3, SET_DEVICE: 1, CAPTURE_MODE: 1}
    found = [tuple(entry)[: 1 + num_arguments.get(entry[0], 5)] for entry in entries[: count.value]]
    count.value = 0
    return found


def last_call(runtime: ctypes.CDLL) -> tuple[int, ...]:
    """Return the last call that is no record."""
    return [call for call in noted(runtime) if call[0] != RECORD][-1]


def last_record(runtime: ctypes.CDLL) -> tuple[int, ...]:
    """Return event and stream of the last record."""
    return [call for call in noted(runtime) if call[0] == RECORD][-1][1:]


# -- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [STREAM, 0])
def test_calls_arrive_and_nothing_follows_an_error(stream: int, cuda: CudaRuntime, runtime: ctypes.CDLL) -> None:
    record: tuple[int, ...] = (RECORD, EVENT, stream)
    for call, arguments, expected in (
        (cuda.calls.record, (EVENT, stream), [record]),
        (cuda.calls.wait, (stream, EVENT), [(WAIT, stream, EVENT, 0)]),
        (cuda.calls.wait_stream, (LEADER, EVENT, stream), [record, (WAIT, LEADER, EVENT, 0)]),
        (cuda.calls.query, (EVENT,), [(QUERY, EVENT)]),
        (cuda.calls.last_error, (), [(LAST_ERROR,)]),
        (cuda.calls.copy_all, (stream, EVENT, 1, [DEVICE, HOST, 1]), [(COPY, DEVICE, HOST, 1, 1, stream), record]),
    ):
        assert call(*arguments) == 0 and noted(runtime) == expected
        with having(runtime, "result", 700):
            assert call(*arguments) == 700 and noted(runtime) == expected[:1]


@pytest.mark.parametrize("count", [1, 2, 64, 65, 100])  # the extension module keeps 64 on its stack
@pytest.mark.parametrize("stream", [STREAM, 0])
def test_copies_arrive_and_the_event_is_last(count: int, stream: int, cuda: CudaRuntime, runtime: ctypes.CDLL) -> None:
    copies = [(HOST + 512 * i, DEVICE + 1024 * i, NBYTES + i) for i in range(count)]
    batch = [*((COPIED, *copy) for copy in copies), (BATCH, count, STREAM, *ATTRIBUTES), (RECORD, EVENT, STREAM)]
    values = [value for copy in copies for value in copy]
    with having(runtime, "result", 700):
        assert cuda.calls.copy_all(stream, EVENT, KIND, values) == 700
        assert [call for call in noted(runtime) if call[0] != COPIED][1:] == []
    assert cuda.calls.copy_all(stream, EVENT, KIND, values) == 0
    if count > 1 and stream != 0:  # CUDA refuses a batch on the default stream
        assert noted(runtime) == batch
    else:
        assert noted(runtime) == [*((COPY, *copy, KIND, stream) for copy in copies), (RECORD, EVENT, stream)]
    columns = [value for values in zip(*copies, strict=True) for value in values]
    cuda.calls.routine([cuda_calls.COPY, STREAM, EVENT, KIND, count, *columns], 0, refuse).run(LEADER)
    assert noted(runtime) == batch  # also a single one: a routine is never captured


def refuse(routine: cuda_calls.Routine, code: int) -> None:
    pytest.fail(f"error {code}")


def test_what_is_no_routine_and_no_argument_is_refused(extension: Any, runtime: ctypes.CDLL) -> None:
    functions = (ctypes.cast(getattr(runtime, f"cuda{symbol}"), ctypes.c_void_p).value for symbol in SYMBOLS)
    native, copy = extension.Calls(*functions), [cuda_calls.COPY, STREAM, EVENT, KIND]
    for wrong in (
        *([cuda_calls.RECORD, STREAM], [4, STREAM, EVENT], [cuda_calls.WAIT, STREAM, EVENT, 0]),
        *(copy, [*copy, 0], [*copy, 2, HOST, DEVICE, 1], [*copy, 1 << 63, HOST, DEVICE, 1]),
        [cuda_calls.COPY, 0, EVENT, KIND, 1, HOST, DEVICE, 1],  # copies are never on the compute stream
        [cuda_calls.BACKGROUND, cuda_calls.WAIT, 0, EVENT],  # whose order is that of the host's calls
        [cuda_calls.BACKGROUND, cuda_calls.BACKGROUND],
    ):
        with pytest.raises(ValueError, match="whole calls"):
            native.routine(wrong, 0, refuse)
    ends_wrongly = [[*(3 * count - 1) * [1], "size"] for count in (1, 100)]
    for copies in ([], [HOST], [HOST, HOST, DEVICE, DEVICE, 1], (HOST, DEVICE, 1), HOST, *ends_wrongly):
        with pytest.raises(TypeError):
            native.copy_all(STREAM, EVENT, KIND, copies)
    for numbers in ((cuda_calls.WAIT, STREAM, EVENT), [cuda_calls.WAIT, STREAM, "event"]):
        with pytest.raises(TypeError):
            native.routine(numbers, 0, refuse)
    for call in (native.record, native.query):
        with pytest.raises(TypeError):
            call("event")
    with pytest.raises(ValueError, match="eight functions"):
        extension.Calls(1, 2, 3, 4, 5, 6, 7, 0, 9)
    noted(runtime)
    routine = native.routine([cuda_calls.RECORD, STREAM, EVENT], 0, refuse)
    del native
    routine.run(0)
    assert noted(runtime) == [(RECORD, EVENT, STREAM)]


def test_the_compiled_package_does_not_call_through_ctypes(runtime: ctypes.CDLL) -> None:
    declare(runtime)
    assert isinstance(make_calls(runtime), CtypesCalls) != IS_COMPILED


@pytest.mark.parametrize(
    ("version", "has_batch"), [(12090, False), (13000, True), (13990, True), (14000, False), (None, False)]
)
def test_a_batch_is_for_runtimes_that_have_it_and_whose_arguments_are_known(
    version: int | None, has_batch: bool, cuda: CudaRuntime, runtime: ctypes.CDLL, folder: Path
) -> None:
    """With other arguments the call would be a wild write."""
    library = runtime
    if version is None:
        library = ctypes.CDLL(str(compile_library(FAKE, folder / "libwithout.so", "-DWITHOUT_BATCH")))
        declare(library)
    with having(library, "version", version or 13000):
        assert has_batch_copy(library) == has_batch
        assert make_calls(library).copy_all(STREAM, EVENT, KIND, [HOST, DEVICE, 1, HOST + 512, DEVICE + 512, 2]) == 0
    each = [(COPY, HOST, DEVICE, 1, KIND, STREAM), (COPY, HOST + 512, DEVICE + 512, 2, KIND, STREAM)]
    assert noted(library)[:-1] == each or has_batch


# -- the class around them --------------------------------------------------------------------------------------------


class Slab:
    address, nbytes = HOST, 8192

    def close(self) -> None: ...


Copies = list[tuple[torch.Tensor, HostRegion]]


def make_copies(*sizes: int) -> Copies:
    return [(torch.zeros(n, dtype=torch.uint8), HostRegion(Slab(), 512 * n, n)) for n in sizes]


def backwards(copies: Copies) -> list[tuple[HostRegion, torch.Tensor]]:
    return [(region, tensor) for tensor, region in copies]


def batch(copies: Copies, event: CudaEvent, is_in: bool = False) -> Noted:
    """Return what is noted of them."""
    places = [(HOST + region.offset, tensor.data_ptr(), region.nbytes) for tensor, region in copies]
    copied = [(COPIED, *(place[1::-1] if is_in else place[:2]), place[2]) for place in places]
    return [*copied, (BATCH, len(copies), STREAM, *ATTRIBUTES), (RECORD, event.handle, STREAM)]


def test_copies_are_of_whole_storages_and_raise_copy_errors(cuda: CudaRuntime, runtime: ctypes.CDLL) -> None:
    storage = torch.zeros(16, 16)
    event = cuda.copy_out(STREAM, [(storage.t()[2:], HostRegion(Slab(), 512, 1024))])
    copied = (COPY, HOST + 512, storage.data_ptr(), 1024, 2, STREAM)
    assert noted(runtime) == [copied, (RECORD, event.handle, STREAM)]
    for wrong in (HostRegion(Slab(), 0, 1023), HostRegion(Slab(), 7680, 1024)):
        with pytest.raises(ValueError, match="bytes"):
            cuda.copy_out(STREAM, [(storage, wrong)])
    copies = make_copies(1, 2, 3)
    copied_out, copied_in = cuda.copy_out(STREAM, copies), cuda.copy_in(STREAM, backwards(copies))
    assert noted(runtime) == [*batch(copies, copied_out), *batch(copies, copied_in, is_in=True)]
    assert copied_in.handle != copied_out.handle
    for some in (copies[:1], copies):
        for copy in (partial(cuda.copy_out, STREAM, some), partial(cuda.copy_in, STREAM, backwards(some))):
            with having(runtime, "result", 1), pytest.raises(CopyError, match="CUDA error 1: reason 1"):
                copy()


def test_a_routine_calls_up_to_an_error(cuda: CudaRuntime, routine: CudaRoutine, runtime: ctypes.CDLL) -> None:
    copies = make_copies(1, 2, 3)
    ran = routine.record_event(COMPUTE)
    routine.wait_event(STREAM, ran)
    copied_out = routine.copy_out(STREAM, copies)
    copied_in = routine.copy_in(STREAM, backwards(copies[:1]))
    routine.wait_event(COMPUTE, copied_in)
    run = routine.finish()
    for _ in range(2):
        run(LEADER)
        calls = noted(runtime)
        assert calls[:2] == [(RECORD, ran.handle, LEADER), (WAIT, STREAM, ran.handle, 0)]
        assert calls[2:-1] == [*batch(copies, copied_out), *batch(copies[:1], copied_in, is_in=True)]
        assert calls[-1] == (WAIT, LEADER, copied_in.handle, 0)
        with having(runtime, "result", 1), pytest.raises(CopyError, match="CUDA error 1: reason 1"):
            run(LEADER)
        assert noted(runtime) == [(RECORD, ran.handle, LEADER), (LAST_ERROR,)]
    assert len({ran.handle, copied_out.handle, copied_in.handle}) == 3
    CudaRoutine(cuda, torch.device("cuda", 0)).finish()(LEADER)
    assert noted(runtime) == []


def test_another_routine_keeps_the_event_that_it_waits_for(cuda: CudaRuntime, runtime: ctypes.CDLL) -> None:
    routine, other = (CudaRoutine(cuda, torch.device("cuda", 0)) for _ in range(2))
    ran = routine.record_event(STREAM)
    handle = ran.handle
    other.wait_event(COMPUTE, ran)
    run = other.finish()
    del routine, ran, other
    assert cuda.unrecorded().handle != handle
    run(LEADER)
    assert noted(runtime) == [(WAIT, LEADER, handle, 0)]
    del run
    assert cuda.unrecorded().handle == handle


def test_a_routine_on_the_default_stream_is_on_that_of_its_device(routine: CudaRoutine, runtime: ctypes.CDLL) -> None:
    event = routine.record_event(COMPUTE)
    run = routine.finish()
    with mock.patch.object(torch.cuda, "device", side_effect=lambda _: having(runtime, "device", 0)) as entered:
        run(0)
        with having(runtime, "device", 1):
            run(LEADER)
            assert not entered.called
            run(0)
            with having(runtime, "result", 700), pytest.raises(CopyError, match="700"):
                run(0)
    entered.assert_called_once_with(torch.device("cuda", 0))
    records = [(RECORD, event.handle, stream) for stream in (0, LEADER, 0)]
    assert noted(runtime) == [*records, (LAST_ERROR,)]


# -- calls in the background ------------------------------------------------------------------------------------------


class Background:
    """Makes routines of the extension module whose copy, in the background, takes until `held` is 0."""

    def __init__(self, runtime: ctypes.CDLL, extension: Any) -> None:
        functions = (ctypes.cast(getattr(runtime, f"cuda{symbol}"), ctypes.c_void_p).value for symbol in SYMBOLS)
        self.calls: Any = extension.Calls(*functions)
        self.codes: list[int] = []
        self.kept: list[cuda_calls.Routine] = []  # a routine waits for its calls when it is dropped

    def routine(self, event: int, *own: int) -> cuda_calls.Routine:
        """Return one that makes its `own` calls, then leaves a copy to the thread, and the record of `event`."""
        numbers = [*own, cuda_calls.BACKGROUND, cuda_calls.COPY, STREAM, event, KIND, 1, HOST, DEVICE, NBYTES]
        note = self.codes.append  # without a reference to this, which keeps routines
        made: cuda_calls.Routine = self.calls.routine(numbers, 3, lambda routine, code: note(code))
        return made

    def run(self, event: int, *own: int) -> None:
        self.kept.append(self.routine(event, *own))
        self.kept[-1].run(LEADER)


OTHER = EVENT + 16
TASKS = Path("/proc/self/task")
COPY_IN_BACKGROUND = [(COPIED, HOST, DEVICE, NBYTES), (BATCH, 1, STREAM, *ATTRIBUTES)]


@pytest.fixture
def background(runtime: ctypes.CDLL, extension: Any) -> Background:
    """Return one whose thread runs."""
    made = Background(runtime, extension)
    noted(runtime)
    made.run(EVENT)
    assert made.calls.settle() == 0
    started = [(SET_DEVICE, 3), (CAPTURE_MODE, 2)]  # it must not disturb the captures of others
    assert noted(runtime) == [*started, *COPY_IN_BACKGROUND, (RECORD, EVENT, STREAM)]
    return made


def ends_while_held(call: Callable[[], object], runtime: ctypes.CDLL) -> bool:
    """Return whether a call ends before the copies in the background do."""
    thread = threading.Thread(target=call, daemon=True)
    with having(runtime, "held", 1):
        thread.start()
        thread.join(0.1)
        has_ended = not thread.is_alive()
    thread.join(10)
    assert not thread.is_alive()
    return has_ended


def test_copies_in_the_background_come_in_order_and_stop_nothing(background: Background, runtime: ctypes.CDLL) -> None:
    routines = [background.routine(event, cuda_calls.RECORD, 0, event + 1) for event in (EVENT, OTHER)]

    def run_and_wait_for_a_record() -> None:
        for routine in routines:
            routine.run(LEADER)
        background.calls.routine([cuda_calls.WAIT, 0, EVENT + 1], 3, refuse).run(LEADER)

    assert ends_while_held(run_and_wait_for_a_record, runtime) and background.calls.settle() == 0
    found = noted(runtime)
    records = [(RECORD, event + 1, LEADER) for event in (EVENT, OTHER)]
    assert [call for call in found if LEADER in call] == [*records, (WAIT, LEADER, EVENT + 1, 0)]
    behind = [[*COPY_IN_BACKGROUND, (RECORD, event, STREAM)] for event in (EVENT, OTHER)]
    assert [call for call in found if LEADER not in call] == [*behind[0], *behind[1]]


@pytest.mark.parametrize(
    "call",
    [
        lambda each: each.calls.record(OTHER, LEADER),
        lambda each: each.calls.wait(LEADER, OTHER),
        lambda each: each.calls.wait_stream(LEADER, OTHER, STREAM),
        lambda each: each.calls.query(OTHER),
        lambda each: each.calls.copy_all(STREAM, OTHER, KIND, [HOST, DEVICE, 1]),
        lambda each: each.calls.settle(),
        lambda each: each.kept[-1].run(LEADER),
        lambda each: each.run(OTHER, cuda_calls.WAIT, 0, EVENT),
        lambda each: each.run(OTHER, cuda_calls.RECORD, STREAM, OTHER + 1),
        lambda each: [each.run(event) for event in range(64)],
        lambda each: each.kept.pop(),  # a routine that is dropped waits for its calls
    ],
    ids="record wait wait_stream query copy_all settle again event stream full drop".split(),
)
def test_what_must_come_behind_them_waits(call: Any, background: Background, runtime: ctypes.CDLL) -> None:
    """Otherwise the calls on a copy stream would change places, and compute would miss an event."""

    def run() -> None:
        background.run(EVENT)
        call(background)

    assert not ends_while_held(run, runtime)


def test_an_error_in_the_background_is_that_of_the_next_call(background: Background, runtime: ctypes.CDLL) -> None:
    def fail() -> None:
        with having(runtime, "result", 700):
            background.run(EVENT)
            background.calls.query(OTHER)  # waits for the calls, and leaves their error
        noted(runtime)

    for ask in (background.calls.settle, lambda: background.calls.record(OTHER, STREAM)):
        fail()
        assert (ask(), noted(runtime), ask()) == (700, [], 0)
    fail()
    for _ in range(2):
        background.run(OTHER, cuda_calls.RECORD, 0, OTHER + 1)
    background.calls.settle()
    assert background.codes == [700]
    assert noted(runtime) == [(RECORD, OTHER + 1, LEADER), *COPY_IN_BACKGROUND, (RECORD, OTHER, STREAM)]


@pytest.mark.skipif(not TASKS.exists(), reason="looks at the threads of this process in /proc: run it on Linux")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of a fork beside threads
def test_the_thread_takes_no_signals_and_ends_with_the_calls(
    runtime: ctypes.CDLL, extension: Any, background: Background
) -> None:
    before = {task.name for task in TASKS.iterdir()}
    another = Background(runtime, extension)
    another.run(EVENT)
    another.calls.settle()
    [task] = {task.name for task in TASKS.iterdir()} - before
    blocked = re.search(r"SigBlk:\s*(\w+)", (TASKS / task / "status").read_text())
    assert int(present(blocked)[1], 16) >> signal.SIGINT - 1 & 1
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with having(runtime, "held", 1):
        another.run(EVENT)
        pid = os.fork()
        if pid == 0:  # without the thread
            signal.alarm(10)
            del another
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    del another
    assert {task.name for task in TASKS.iterdir()} == before


def test_in_a_capture_each_copy_is_a_call_and_no_event_is_asked(cuda: CudaRuntime, runtime: ctypes.CDLL) -> None:
    copies = make_copies(1, 2)
    cuda.record_graph(True)
    event = cuda.copy_out(STREAM, copies)
    each = [(COPY, HOST + region.offset, tensor.data_ptr(), region.nbytes, 2, STREAM) for tensor, region in copies]
    assert [call for call in noted(runtime) if call[0] != RECORD] == each
    for is_recording in (True, False):
        cuda.record_graph(is_recording)
        with having(runtime, "num_synchronized", 0):
            assert cuda.is_complete(event) != is_recording
            cuda.synchronize(event)
            assert noted(runtime) == [(QUERY, event.handle)] * (not is_recording)
            assert number(runtime, "num_synchronized").value == (not is_recording)


def test_streams_are_its_own_until_it_closes(cuda: CudaRuntime, runtime: ctypes.CDLL) -> None:
    streams = [cuda.new_stream(), cuda.new_stream()]
    assert [call[:2] for call in noted(runtime)] == [(7, 1)] * 2, "they must not wait for the default stream"
    assert streams == [0x1000, 0x2000]
    cuda.finish()
    cuda.close()
    cuda.close()
    assert [call[:2] for call in noted(runtime)] == [*((8, each) for each in streams), (9, 0x2000), (9, 0x1000)]


def test_an_event_is_asked_until_it_is_done_and_reused(cuda: CudaRuntime, runtime: ctypes.CDLL) -> None:
    """A failed one is not complete and raises for its waiter, as on the CPU device."""
    idle = [EVENT]
    event = CudaEvent(idle.pop(), idle)
    for code, asks in ((NOT_READY, (cuda.is_complete, cuda.poll)), (700, (cuda.is_complete,))):
        with having(runtime, "result", code):
            for ask in asks:
                assert not ask(event)
                # Else torch would take the answer for an error of its own.
                assert noted(runtime) == [(QUERY, EVENT), (LAST_ERROR,)]
    for fail in (partial(cuda.wait, STREAM), cuda.poll):
        with having(runtime, "result", 700), pytest.raises(CopyError, match="CUDA error 700: reason 700"):
            fail(event)
    noted(runtime)
    cuda.wait(STREAM, event)
    assert cuda.poll(event) and cuda.is_complete(event) and event.is_done
    cuda.wait(STREAM + 1, event)  # a wait for what is done would be a call in vain
    assert noted(runtime) == [(WAIT, STREAM, EVENT, 0), (QUERY, EVENT)]
    del event
    assert idle == [EVENT]


def test_other_threads_run_while_one_waits_for_a_small_read(cuda: CudaRuntime, runtime: ctypes.CDLL) -> None:
    """Compiled or not: neither the loop nor the question lets go of the interpreter by itself."""
    event = CudaEvent(EVENT, [])
    read, done = MappedRead(torch.zeros(1), event, cuda), threading.Event()
    waiting = threading.Thread(target=lambda: [call() for call in (read.wait, done.set)], daemon=True)
    with having(runtime, "result", NOT_READY):
        waiting.start()
        assert not done.wait(0.05)
    waiting.join(10)
    assert done.is_set() and event.is_done


def test_where_kernels_find_host_memory(cuda: CudaRuntime, runtime: ctypes.CDLL) -> None:
    assert cuda.device_address(HOST) == HOST + 64 and last_call(runtime)[:3] == (11, HOST, 0)
    with having(runtime, "result", 1):
        assert cuda.device_address(HOST) is None
    assert last_call(runtime) == (LAST_ERROR,)
