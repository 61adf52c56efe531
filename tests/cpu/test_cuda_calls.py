"""Calls of the CUDA runtime, through ctypes and through our extension module, to a library that only takes notes."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_engine import IS_COMPILED
from offload_engine._devices.base import HostRegion
from offload_engine._devices.cuda_runtime import CudaEvent, CudaRuntime, hot_calls

SOURCE = Path(__file__).parents[2] / "offload_engine" / "_devices" / "_cuda_calls.c"
COMPILER = shutil.which("cc") or shutil.which("gcc")
HAS_HEADERS = (Path(sysconfig.get_path("include")) / "Python.h").exists()
pytestmark = pytest.mark.skipif(
    COMPILER is None or not HAS_HEADERS, reason="needs a C compiler (cc) and Python's headers (python3-dev)"
)

FAKE = """
#include <stddef.h>
#include <stdint.h>
uint64_t noted[6];
int result = 0;
static int note(uint64_t call, uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e)
{
    uint64_t values[6] = {call, a, b, c, d, e};
    for (int i = 0; i < 6; i++) noted[i] = values[i];
    return result;
}
int cudaEventRecord(void *event, void *stream) { return note(1, (uint64_t)event, (uint64_t)stream, 0, 0, 0); }
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags)
{
    return note(2, (uint64_t)stream, (uint64_t)event, flags, 0, 0);
}
int cudaEventQuery(void *event) { return note(3, (uint64_t)event, 0, 0, 0, 0); }
int cudaMemcpyAsync(void *to, const void *from, size_t nbytes, int kind, void *stream)
{
    return note(4, (uint64_t)to, (uint64_t)from, nbytes, (uint64_t)kind, (uint64_t)stream);
}
int cudaEventCreateWithFlags(void **event, unsigned flags) { return 0; }
int cudaEventSynchronize(void *event) { return 0; }
int cudaEventDestroy(void *event) { return 0; }
int cudaGetLastError(void) { return note(5, 0, 0, 0, 0, 0); }
"""
# As on a GPU: addresses beyond 2^47, a copy beyond 2^32, and 0 for the default stream.
EVENT, STREAM, DEVICE, HOST, NBYTES = 0x7F00_1234_5678, 0x55AA_0000_1000, 0x7FFF_F000_0200, 0x7F12_0000_0000, 5 << 32
CALLS = [
    ("record", (EVENT, STREAM), (1, EVENT, STREAM, 0, 0, 0)),
    ("record", (EVENT, 0), (1, EVENT, 0, 0, 0, 0)),
    ("wait", (STREAM, EVENT, 0), (2, STREAM, EVENT, 0, 0, 0)),
    ("wait", (0, EVENT, 1), (2, 0, EVENT, 1, 0, 0)),
    ("query", (EVENT,), (3, EVENT, 0, 0, 0, 0)),
    ("copy", (HOST, DEVICE, NBYTES, 2, STREAM), (4, HOST, DEVICE, NBYTES, 2, STREAM)),
    ("copy", (DEVICE, HOST, 1, 1, 0), (4, DEVICE, HOST, 1, 1, 0)),
    ("last_error", (), (5, 0, 0, 0, 0, 0)),
]
NAMES = ("record", "wait", "query", "copy", "last_error")
SYMBOLS = ("cudaEventRecord", "cudaStreamWaitEvent", "cudaEventQuery", "cudaMemcpyAsync", "cudaGetLastError")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("built")


@pytest.fixture(scope="module")
def runtime(folder: Path) -> ctypes.CDLL:
    (folder / "fake.c").write_text(FAKE)
    return ctypes.CDLL(str(compile_library(folder / "fake.c", folder / "libfake.so")))


@pytest.fixture(scope="module")
def extension(folder: Path) -> Any:
    """The extension module, built from the source of this checkout, whatever is installed."""
    path = compile_library(SOURCE, folder / "_cuda_calls.so")
    loader = importlib.machinery.ExtensionFileLoader("_cuda_calls", str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("_cuda_calls", loader))
    loader.exec_module(module)
    return module


@pytest.fixture(params=["installed", "extension module"])
def calls(request: pytest.FixtureRequest, runtime: ctypes.CDLL, extension: Any) -> dict[str, Callable[..., int]]:
    """`hot_calls` as installed (ctypes in a checkout), and the extension module."""
    installed = dict(zip(NAMES, hot_calls(runtime), strict=True))
    if request.param == "installed":
        return installed
    native = extension.Calls(*addresses(runtime))
    return {name: getattr(native, name) for name in NAMES}


def compile_library(source: Path, target: Path) -> Path:
    assert COMPILER is not None
    flags = [
        "-shared",
        "-fPIC",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unused-parameter",
        "-Wno-missing-field-initializers",
    ]
    command = [COMPILER, *flags, f"-I{sysconfig.get_path('include')}", str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    return target


def addresses(runtime: ctypes.CDLL) -> list[int | None]:
    return [ctypes.cast(getattr(runtime, symbol), ctypes.c_void_p).value for symbol in SYMBOLS]


@pytest.mark.parametrize(("name", "arguments", "noted"), CALLS)
def test_arguments_arrive(
    name: str, arguments: tuple[int, ...], noted: tuple[int, ...], calls: dict[str, Any], runtime: ctypes.CDLL
) -> None:
    assert calls[name](*arguments) == 0
    assert tuple((ctypes.c_uint64 * 6).in_dll(runtime, "noted")) == noted


@pytest.mark.parametrize(("name", "arguments"), [(name, arguments) for name, arguments, _ in CALLS])
def test_error_codes_come_back(
    name: str, arguments: tuple[int, ...], calls: dict[str, Any], runtime: ctypes.CDLL
) -> None:
    result = ctypes.c_int.in_dll(runtime, "result")
    result.value = 600
    try:
        assert calls[name](*arguments) == 600
    finally:
        result.value = 0


def test_the_compiled_package_does_not_call_through_ctypes(runtime: ctypes.CDLL) -> None:
    record = hot_calls(runtime)[0]
    assert (type(record).__name__ == "builtin_function_or_method") == IS_COMPILED


def test_wrong_arguments_are_refused(extension: Any, runtime: ctypes.CDLL) -> None:
    native = extension.Calls(*addresses(runtime))
    with pytest.raises(TypeError, match=r"record\(\) takes 2 arguments, got 1"):
        native.record(EVENT)
    with pytest.raises(TypeError):
        native.query("event")
    with pytest.raises(OverflowError):
        native.wait(-1, EVENT, 0)
    with pytest.raises(ValueError, match="five functions"):
        extension.Calls(1, 2, 3, 4, 0)


# ---- the class around them ----


class Slab:
    address, nbytes = HOST, 8192


def last_call(runtime: ctypes.CDLL) -> tuple[int, ...]:
    return tuple((ctypes.c_uint64 * 6).in_dll(runtime, "noted"))


def test_copies_are_of_whole_storages(runtime: ctypes.CDLL) -> None:
    cuda = CudaRuntime(torch.device("cuda", 0), runtime)
    storage = torch.zeros(16, 16)
    address = storage.data_ptr()
    cuda.copy_out(STREAM, storage.t()[2:], HostRegion(Slab(), 512, 1024))
    assert last_call(runtime) == (4, HOST + 512, address, 1024, 2, STREAM)
    cuda.copy_in(STREAM, HostRegion(Slab(), 4096, 1024), storage)
    assert last_call(runtime) == (4, address, HOST + 4096, 1024, 1, STREAM)
    for wrong in (HostRegion(Slab(), 0, 1023), HostRegion(Slab(), 7680, 1024)):
        with pytest.raises(ValueError, match="bytes"):
            cuda.copy_out(STREAM, storage, wrong)


def test_events_are_reused_and_asked_until_they_are_done(runtime: ctypes.CDLL) -> None:
    idle = [EVENT]
    event = CudaEvent(idle.pop(), idle)
    cuda = CudaRuntime(torch.device("cuda", 0), runtime)
    result = ctypes.c_int.in_dll(runtime, "result")
    result.value = 600  # cudaErrorNotReady
    assert not cuda.is_complete(event)
    assert last_call(runtime)[0] == 5, "torch would take the answer for an error of its own"
    result.value = 0
    cuda.wait(STREAM, event)
    assert last_call(runtime) == (2, STREAM, EVENT, 0, 0, 0)
    assert cuda.is_complete(event)
    assert last_call(runtime) == (3, EVENT, 0, 0, 0, 0)
    cuda.wait(STREAM + 1, event)
    assert last_call(runtime)[0] == 3, "a wait for what is done is a call in vain"
    del event
    assert idle == [EVENT]
