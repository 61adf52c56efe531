"""What CUDA answers to single calls in a capture; each may end the capture, so each has one of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from graph_probe.facts import cuda_runtime
from graph_probe.stage import MIB
from offload_engine._devices.cuda import CudaDevice

_MODES = ("global", "thread_local")


def run_calls(emit: Callable[..., None]) -> None:
    """Tell, call by call, what CUDA returns in a capture, whether the capture lives on, and whether it ends."""
    device = CudaDevice()
    slab: Any = device.new_slab(4 * MIB)
    source = torch.ones(2, MIB, dtype=torch.uint8, device="cuda")
    library, calls = cuda_runtime(), device._runtime
    kept: list[Any] = []  # registered memory stays
    before = calls.record(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()

    def batch(stream: int) -> int:
        values = [slab.address, source[0].data_ptr(), MIB, slab.address + MIB, source[1].data_ptr(), MIB]
        return calls._copy_all(stream, calls._new_event(2), 2, values)

    def single(stream: int) -> int:
        return calls._copy_all(stream, calls._new_event(2), 2, [slab.address, source[0].data_ptr(), MIB])

    def captured_query(stream: int) -> int:
        return calls._query(calls.record(stream).handle)

    def register(stream: int) -> int:
        memory = ctypes.create_string_buffer(8192)
        aligned = (ctypes.addressof(memory) + 4095) & -4096
        kept.append(memory)
        return int(library.cudaHostRegister(ctypes.c_void_p(aligned), ctypes.c_size_t(4096), 1))

    def new_event(stream: int) -> int:
        return 0 if calls._new_event(2) else -1

    tried: dict[str, Callable[[int], int]] = {
        "one cudaMemcpyAsync": single,
        "cudaMemcpyBatchAsync": batch,
        "cudaEventCreateWithFlags": new_event,
        "cudaEventQuery of a complete event of before": lambda _: calls._query(before.handle),
        "cudaEventQuery of an event of the capture": captured_query,
        "cudaStreamWaitEvent on an event of before": lambda stream: calls._wait(stream, before.handle),
        "cudaEventSynchronize of an event of before": lambda _: library.cudaEventSynchronize(
            ctypes.c_void_p(before.handle)
        ),
        "cudaHostRegister": register,
    }
    for name, call in tried.items():
        for mode in _MODES:
            emit(stage=f"{name} ({mode})", **_try(call, mode))


def _try(call: Callable[[int], int], mode: str) -> dict[str, Any]:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    found: dict[str, Any] = {}
    work = torch.ones(16, device="cuda")
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
            work.add_(1)
            try:
                found["code"] = call(stream.cuda_stream)
            except Exception as error:
                found["raised"] = repr(error)[:120]
            cuda_runtime().cudaGetLastError()
            found["status"] = _status(stream.cuda_stream)
            work.add_(1)
        found["ended"] = True
        graph.replay()
        torch.cuda.synchronize()
        found["replayed"] = work[0].item() == 3
    except Exception as error:
        found["ended"] = repr(error)[:160]
        cuda_runtime().cudaGetLastError()
    return found


def _status(stream: int) -> int:
    status = ctypes.c_int(-1)
    cuda_runtime().cudaStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status))
    return status.value  # 0: none, 1: active, 2: invalidated
