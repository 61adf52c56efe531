"""Small experiments that answer what CUDA and torch do in a capture. Each is told of at once, and may fail alone."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch

from graph_probe.copies import best, copies_in_a_graph
from graph_probe.late import late_events, late_values
from graph_probe.stage import MIB

_LARGE = 64 * MIB


def run_facts(emit: Callable[..., None]) -> None:
    """Run all experiments."""
    for experiment in (
        versions,
        reuse_of_emptied_storages,
        reuse_of_recorded_blocks,
        external_events,
        copies_in_a_graph,
        cost_of_replay,
        late_events,
        late_values,
    ):
        begin = time.perf_counter()
        try:
            found: dict[str, Any] = experiment()
        except Exception as error:  # the others go on
            found = {"failed": repr(error)}
        emit(stage=experiment.__name__, seconds=round(time.perf_counter() - begin, 2), **found)
        try:
            torch.cuda.synchronize()
        except Exception as error:
            emit(stage=experiment.__name__, device_lost=repr(error))
            return


def versions() -> dict[str, Any]:
    runtime, driver = ctypes.c_int(), ctypes.c_int()
    library = cuda_runtime()
    library.cudaRuntimeGetVersion(ctypes.byref(runtime))
    library.cudaDriverGetVersion(ctypes.byref(driver))
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "runtime": runtime.value,
        "driver": driver.value,
        "device": torch.cuda.get_device_name(),
    }


def reuse_of_emptied_storages() -> dict[str, Any]:
    """Whether bytes freed in a capture, by a drop or by resize_(0), are given out again in it."""
    found: dict[str, Any] = {}
    for how in ("dropped", "resized", "dropped behind a joined copy"):
        graph, stream, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.Stream()
        host = torch.empty(_LARGE, dtype=torch.uint8, pin_memory=True)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        with torch.cuda.graph(graph, stream=stream):
            first = torch.ones(_LARGE, dtype=torch.uint8, device="cuda")
            address = first.data_ptr()
            if how.endswith("copy"):
                side.wait_stream(stream)
                with torch.cuda.stream(side):
                    host.copy_(first, non_blocking=True)
                stream.wait_stream(side)
            if how == "resized":
                first.untyped_storage().resize_(0)
            else:
                del first
            second = torch.full((_LARGE,), 7, dtype=torch.uint8, device="cuda")
            found[how] = {"is_reused": second.data_ptr() == address}
            if how == "resized":
                third = first.untyped_storage()
                third.resize_(_LARGE)
                first.fill_(9)
        graph.replay()
        torch.cuda.synchronize()
        found[how]["pool_mib"] = (torch.cuda.memory_reserved() - before) // MIB
        found[how]["is_right"] = bool((second == 7).all()) and (not how.endswith("copy") or bool((host == 1).all()))
        if how == "resized":
            found[how]["is_refilled"] = bool((first == 9).all())
        del second, graph
        first = third = None
    return found


def reuse_of_recorded_blocks() -> dict[str, Any]:
    """The same with `record_stream`, which the engine does without."""
    graph, stream, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.Stream()
    host = torch.empty(_LARGE, dtype=torch.uint8, pin_memory=True)
    with torch.cuda.graph(graph, stream=stream):
        first = torch.ones(_LARGE, dtype=torch.uint8, device="cuda")
        address = first.data_ptr()
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            host.copy_(first, non_blocking=True)
            first.record_stream(side)
        stream.wait_stream(side)
        del first
        second = torch.ones(_LARGE, dtype=torch.uint8, device="cuda")
        found = {"is_reused": second.data_ptr() == address}
    return found


def external_events() -> dict[str, Any]:
    """Whether eager copies can start behind a part of a graph, and a part of a graph wait for eager copies."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    flag, seen = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda")
    stream, side = torch.cuda.Stream(), torch.cuda.Stream()
    source = torch.ones(512 * MIB, dtype=torch.uint8, device="cuda")
    host = torch.empty(512 * MIB, dtype=torch.uint8, pin_memory=True)
    done, ready = torch.cuda.Event(external=True), torch.cuda.Event(external=True)
    with torch.cuda.stream(stream):
        torch.mm(a, b, out=out)
        ready.record(stream)  # torch makes an event when it is recorded first, and ignores waits for it before that
        torch.cuda.synchronize()
        graph, waiting = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            torch.mm(a, b, out=out)
            done.record(stream)
            for _ in range(20):
                torch.mm(a, b, out=out)
        with torch.cuda.graph(waiting, stream=stream):
            torch.mm(a, b, out=out)
            ready.wait(stream)
            seen.copy_(flag)

        def copy() -> None:
            with torch.cuda.stream(side):
                host.copy_(source, non_blocking=True)

        def behind_event() -> None:
            graph.replay()
            side.wait_event(done)
            copy()

        def behind_graph() -> None:
            graph.replay()
            side.wait_stream(stream)
            copy()

        times = {name: best(run) for name, run in _named(graph.replay, copy, behind_event, behind_graph)}
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            for _ in range(20):
                torch.mm(a, b, out=torch.empty_like(out))
            flag.fill_(5)
            ready.record(side)
        waiting.replay()
        torch.cuda.synchronize()
    return {"ms": times, "graph_waited": seen.item() == 5}


def cost_of_replay() -> dict[str, Any]:
    """Return host and device time of replays, by the number of nodes: small kernels one after the other."""
    found: dict[str, Any] = {}
    x, stream = torch.zeros(16, device="cuda"), torch.cuda.Stream()
    for count in (10, 100, 1000, 5000):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(count):
                    x.add_(1)
            hosts = []
            for _ in range(20):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                graph.replay()
                hosts.append(1e6 * (time.perf_counter() - begin))
            found[str(count)] = {"host_us": round(sorted(hosts)[10], 1), "ms": best(graph.replay)}
    return found


def _named(*runs: Callable[[], object]) -> list[tuple[str, Callable[[], object]]]:
    return [(run.__name__, run) for run in runs]


def cuda_runtime() -> Any:
    process = ctypes.CDLL(None)
    if hasattr(process, "cudaStreamIsCapturing"):
        return process
    return ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")
