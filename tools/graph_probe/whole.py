"""G1: a whole step in one graph, with the engine inside; and eager steps for comparison."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from graph_probe.nodes import describe
from graph_probe.stage import MIB, PARTS, Job, Shape, kernels, memory, pool_segments, timed
from offload_engine import FixedBounds, LowestPeak, OffloadConfig, OffloadEngine, Planned, ResidentLayers
from offload_engine.frontends._common.groups import GROUP_BYTES
from offload_engine.frontends._common.session import Session
from offload_engine.frontends._common.weights import weights_of
from offload_engine.frontends._layers.find_layers import Layer
from offload_engine.frontends._layers.layer_groups import LayerGroups

POLICIES = {
    "lowest": LowestPeak(),
    "planned": Planned(),
    "layers": ResidentLayers(),
    "1g": FixedBounds(max_inflight_bytes=1024 * MIB),
}


class Offload:
    """The engine on one part of each layer of a stage. One iteration is a whole step."""

    def __init__(self, job: Job, part: str, policy: str, per_microbatch: bool) -> None:
        self.engine = OffloadEngine(OffloadConfig(min_tensor_bytes=MIB, policy=POLICIES[policy]))
        modules = [Layer(f"layers.{i}.{part}", PARTS[part](layer)) for i, layer in enumerate(job.stage.layers)]
        stage = job.stage
        session = Session(self.engine, lambda: weights_of((stage,)), owns_iterations=per_microbatch)
        self.groups = LayerGroups(stage, modules, session, group_bytes=GROUP_BYTES)
        self._actions = job.shape.actions()
        self._job, self._per_microbatch = job, per_microbatch

    @contextmanager
    def iteration(self) -> Iterator[None]:
        if self._per_microbatch:
            yield
            return
        with self.engine.iteration(self._actions, weights_of((self._job.stage,))):
            yield


def run_whole(
    shape: Shape, part: str | None, is_captured: bool, policy: str, rounds: int, emit: Callable[..., None], **more: Any
) -> None:
    """Measure steps: eager or captured, without offload or with what `part` of each layer saves."""
    is_exact = bool(more.get("exact"))
    with ExitStack() as stack:
        stack.enter_context(kernels(is_exact))
        stream = torch.cuda.Stream()
        stack.enter_context(torch.cuda.stream(stream))
        job = Job(shape)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        emit(stage="made", **memory("model"))
        offload = None if part is None else Offload(job, part, policy, bool(more.get("per_microbatch")))
        iteration = offload.iteration if offload is not None else ExitStack
        begin = time.perf_counter()
        for _ in range(3):
            job.step(iteration)
        torch.cuda.synchronize()
        if is_captured and offload is not None:
            emit(stage="rehearsed", **_rehearse(job, offload))
        emit(stage="warm", seconds=round(time.perf_counter() - begin, 2), **_bits(job, is_exact), **memory("warm"))
        if not is_captured:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            job.step(iteration)
            emit(stage="timed", **timed(lambda: job.step(iteration), rounds), **memory("eager"), **_stats(offload))
            emit(stage="compared", **_bits(job, is_exact))
            return
        _measure_graph(job, offload, iteration, stream, rounds, emit, dump=more.get("dump"), is_exact=is_exact)


def _bits(job: Job, is_exact: bool) -> dict[str, Any]:
    """Return the bits of the last step, if steps can be compared at all."""
    return {"bits": job.bits()} if is_exact else {}


def _measure_graph(
    job: Job,
    offload: Offload | None,
    iteration: Any,
    stream: Any,
    rounds: int,
    emit: Callable[..., None],
    dump: Any,
    is_exact: bool,
) -> None:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    if dump:
        graph.enable_debug_mode()
    job.losses = []
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    emit(stage="before capture", **memory("before"))
    begin = time.perf_counter()
    with ExitStack() as stack:
        capture = torch.cuda.graph(graph, stream=stream)
        captured = stack.enter_context(capture if offload is None else offload.engine.graphs.capture(capture))
        job.step(iteration)
    middle = time.perf_counter()
    emit(stage="captured", capture_s=round(middle - begin, 3), **memory("captured"), **_stats(offload))
    try:
        emit(stage="nodes", nodes=describe(graph.raw_cuda_graph(), dump))
        if dump:
            graph.debug_dump(str(dump).removesuffix(".json.gz") + ".dot")
    except Exception as error:
        emit(stage="nodes", failed=repr(error))
    losses = job.losses
    begin = time.perf_counter()
    graph.instantiate()
    emit(stage="instantiated", instantiate_s=round(time.perf_counter() - begin, 3), **memory("instantiated"))
    for grad in job.grads:
        grad.fill_(float("nan"))  # a replay zeroes them
    graph.replay()
    torch.cuda.synchronize()
    emit(stage="compared", which="first replay", **_bits(job, is_exact), **memory("replayed"))
    emit(stage="timed", **timed(graph.replay, rounds), **memory("graph"))
    emit(stage="compared", which="after timed replays", **_bits(job, is_exact))
    for _ in range(2):
        emit(stage="poisoned", **_poison(graph, captured))
        graph.replay()
        torch.cuda.synchronize()
        emit(stage="compared", which="poisoned", **_bits(job, is_exact))
    if offload is not None and captured is not None:
        job.step(iteration)  # eagerly, with host memory of its own
        torch.cuda.synchronize()
        emit(stage="compared", which="eager step between replays", **_bits(job, is_exact))
        job.losses = losses
        graph.replay()
        torch.cuda.synchronize()
        emit(stage="compared", which="replay after it", **_bits(job, is_exact))
        try:
            offload.engine.close()
            emit(stage="close", refused=False)
        except RuntimeError as error:
            emit(stage="close", refused=str(error))
        graph.reset()
        captured.release()
        offload.engine.close()
        emit(stage="closed")


def _rehearse(job: Job, offload: Offload) -> dict[str, Any]:
    """Run a step in which no copy is known to have completed, as in a capture, and tell what host memory that takes."""
    engine: Any = offload.engine
    before = engine.pool.slab_bytes_total, engine.stats.peak_host_bytes
    asked = engine._executor, engine.pool._slabs.free
    kept = [each._is_complete for each in asked]
    for each in asked:
        each._is_complete = lambda event: False
    job.step(offload.iteration)
    for each, function in zip(asked, kept, strict=True):
        each._is_complete = function
    torch.cuda.synchronize()
    after = engine.pool.slab_bytes_total, engine.stats.peak_host_bytes
    return {
        "host_mib": [n // MIB for n in (before[0], after[0])],
        "lent_mib": [n // MIB for n in (before[1], after[1])],
    }


def run_refusals(shape: Shape, emit: Callable[..., None]) -> None:
    """Try what is refused, and whether the next step and the next capture are right."""
    with ExitStack() as stack:
        stack.enter_context(kernels(is_exact=True))
        stream = torch.cuda.Stream()
        stack.enter_context(torch.cuda.stream(stream))
        job = Job(shape)
        offload = Offload(job, "layer", "lowest", False)
        graphs: list[torch.cuda.CUDAGraph] = []
        losses: list[list[torch.Tensor]] = []

        def attempt(name: str, is_announced: bool = True) -> None:
            graph = torch.cuda.CUDAGraph()
            try:
                with ExitStack() as inner:
                    capture = torch.cuda.graph(graph, stream=stream)
                    inner.enter_context(offload.engine.graphs.capture(capture) if is_announced else capture)
                    job.step(offload.iteration)
                graphs.append(graph)
                losses.append(job.losses)
                emit(stage=name, refused=False)
            except Exception as error:
                emit(stage=name, refused=repr(error)[:300], cause=repr(error.__context__)[:300])

        def eager(name: str) -> None:
            job.step(offload.iteration)
            torch.cuda.synchronize()
            emit(stage=name, bits=job.bits())

        attempt("capture before the first step")
        eager("first step")
        eager("second step")
        attempt("unannounced capture", is_announced=False)
        eager("step behind the unannounced capture")
        offload.engine.trim_host_memory()
        attempt("capture without host memory")
        eager("step behind the refused capture")
        _rehearse(job, offload)
        attempt("first capture")
        eager("step behind the first capture")
        _rehearse(job, offload)
        attempt("second capture, while the first lives")
        for number in (0, 1, 0, 1):
            graphs[number].replay()
            torch.cuda.synchronize()
            job.losses = losses[number]
            emit(stage=f"replay of capture {number}", bits=job.bits())


def _poison(graph: torch.cuda.CUDAGraph, captured: Any) -> dict[str, int]:
    """Overwrite all device memory of the graph's pool, and all its host memory, with bytes that are NaN."""
    runtime = ctypes.CDLL(None)
    if not hasattr(runtime, "cudaMemset"):
        runtime = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")
    torch.cuda.synchronize()
    segments = pool_segments(graph.pool())
    for address, nbytes in segments:
        code = runtime.cudaMemset(ctypes.c_void_p(address), 0xFF, ctypes.c_size_t(nbytes))
        assert code == 0, code
    torch.cuda.synchronize()
    host = 0
    if captured is not None and captured.slabs is not None:
        for slab in captured.slabs.by_index.values():
            slab.view(0, slab.nbytes).fill_(0xFF)
            host += slab.nbytes
    return {"device_mib": sum(nbytes for _, nbytes in segments) // MIB, "host_mib": host // MIB}


def _stats(offload: Offload | None) -> dict[str, Any]:
    if offload is None:
        return {}
    stats = offload.engine.stats
    return {
        "stats": {
            name: getattr(stats, name)
            for name in (
                "num_groups",
                "num_offloaded_groups",
                "num_kept_groups",
                "copied_out_bytes",
                "peak_host_bytes",
                "host_bytes",
                "peak_resident_bytes",
                "prefetch_misses",
                "num_host_limit_groups",
                "num_storages_left",
            )
            if hasattr(stats, name)
        }
    }
