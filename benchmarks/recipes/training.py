# SPDX-License-Identifier: Apache-2.0
"""The model, its graphs and its shards, and a step of it, in a process of its own."""

from __future__ import annotations

import contextlib
import gc
import io
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from .settings import WARMUP, Job

if TYPE_CHECKING:
    from offload_engine import OffloadEngine

_STEPS_AROUND = 3  # in which the host's time around replays is measured


def measure(job: Job) -> dict[str, Any]:
    """Train in this process, which has the GPU to itself; return the fields of a record."""
    from benchmarks.gpu.measure import timed_steps
    from benchmarks.gpu.model import start_ranks

    ranks = start_ranks(job.shape)
    assert ranks.world_size == 1
    with _offload(job) as find_engine, contextlib.redirect_stdout(io.StringIO()):
        training = _Training(job)
        for _ in range(WARMUP):
            training.step()
        training.capture()
        training.step()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        training.step()
        engine = find_engine()
        step_ms, host_ms, losses = timed_steps(job.num_steps, training.step)
        found = {
            "step_ms": step_ms,
            "host_ms": host_ms,
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "moved_bytes": _moved_bytes(job, engine),
            "loss": sum(value.item() for value in losses),
            "around_replays_us": _around_replays_us(training, engine),
        }
        training.close()
    return found


def _around_replays_us(training: _Training, engine: OffloadEngine | None) -> list[float]:
    """Return the host's time around each replay of a graph of a layer in some steps: before it and after it."""
    seconds: list[float] = []

    def timed(call: Callable[[int], None]) -> Callable[[int], None]:
        def run(number: int) -> None:
            begin = time.perf_counter()
            call(number)
            seconds.append(time.perf_counter() - begin)

        return run

    for layers in () if engine is None else engine.graphs.layers:
        layers.before, layers.after = timed(layers.before), timed(layers.after)
    for _ in range(_STEPS_AROUND):
        training.step()
    return [1e6 * (before + after) for before, after in zip(seconds[0::2], seconds[1::2], strict=True)]


@contextlib.contextmanager
def _offload(job: Job) -> Iterator[Callable[[], OffloadEngine | None]]:
    """Put ours on, where it is the contender; yield a function that returns its engine."""
    kind = job.contender.kind
    if kind in ("none", "incumbent"):
        yield lambda: None
        return
    from megatron_patches import apply
    from offload_engine import OffloadConfig

    is_taken_over = kind == "taken-over"
    names = () if is_taken_over else job.modules
    config = OffloadConfig.from_flags(**({} if is_taken_over else dict(job.contender.engine)))
    with apply(config, modules=names, replace_fine_grained=is_taken_over) as handle:
        yield lambda: handle.engine


def _moved_bytes(job: Job, engine: OffloadEngine | None) -> int | None:
    """Return the bytes on the host; None if they are not counted."""
    if engine is None:
        return None if job.contender.kind == "incumbent" else 0
    layers = sum(layers.copied_out_bytes for layers in engine.graphs.layers)
    return int(engine.stats.copied_out_bytes) + layers * job.shape.nmb


class _Training:
    """The model, its graphs, and a step of it."""

    def __init__(self, job: Job) -> None:
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        from benchmarks.gpu.model import Training, build_chunks, make_config

        self._job = job
        self._has_layers = job.graphs == "layers"
        fields = job.config_fields()
        # Every contender has the same weights, with generators that its graphs can register.
        torch.manual_seed(1)
        trackers = {"te_rng_tracker": self._has_layers, "use_cudagraphable_rng": job.graphs == "step"}
        model_parallel_cuda_manual_seed(1, **trackers, force_reset_rng=True)
        self._config = make_config(job.shape, **fields)
        self._chunks = with_gradients(build_chunks(job.shape, self._config), self._config, job)
        self._training = Training(job.shape, self._chunks, keeps_gradients=True)
        self._graphs: Any = None
        self._schedule: Any = _captured_schedule() if job.graphs == "step" else None

    def step(self) -> list[Any]:
        """Run a step; return the losses."""
        from unittest import mock

        from megatron.core import pipeline_parallel

        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        if self._schedule is None:
            return self._training.step()
        with mock.patch.object(pipeline_parallel, "get_forward_backward_func", lambda: self._schedule):
            return self._training.step()

    def capture(self) -> None:
        """Capture the layers. A whole step is captured by the step that comes next."""
        if not self._has_layers:
            return
        from megatron.core import num_microbatches_calculator
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        shape = self._job.shape
        num_microbatches_calculator.init_num_microbatches_calculator(0, None, shape.nmb * shape.mbs, shape.mbs, 1)
        self._graphs = TECudaGraphHelper(self._chunks, self._config, shape.seq, shape.mbs)
        self._graphs.create_cudagraphs()

    def close(self) -> None:
        """Drop the graphs."""
        if self._graphs is not None:
            self._graphs.delete_cuda_graphs()
        if self._schedule is not None:
            self._schedule.reset_cuda_graph("training")


def with_gradients(chunks: list[Any], config: Any, job: Job) -> list[Any]:
    """Give all parameters gradients as megatron-core's training does, and where it is asked for shards of them."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    if job.graphs == "step":
        return [_with_fixed_gradients(chunk) for chunk in chunks]
    if job.sharding is not None:
        return _sharded(chunks, config, job.sharding)
    parallel = DistributedDataParallelConfig(grad_reduce_in_fp32=False)
    with torch.cuda.stream(torch.cuda.Stream()):  # where gradients are added up: none may be on the default one
        torch.cuda.synchronize()
        wrapped = [DistributedDataParallel(config, parallel, Float16Module(config, chunk)) for chunk in chunks]
        torch.cuda.synchronize()
    return wrapped


def _with_fixed_gradients(chunk: Any) -> Any:
    grads = [torch.zeros_like(parameter) for parameter in chunk.parameters()]
    for parameter, grad in zip(chunk.parameters(), grads, strict=True):
        parameter.grad = grad
    chunk.zero_grad_buffer = lambda: torch._foreach_zero_(grads)
    return chunk


def _sharded(chunks: list[Any], config: Any, strategy: str) -> list[Any]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.transformer.module import Float16Module

    sharding = DistributedDataParallelConfig(
        use_megatron_fsdp=True, use_distributed_optimizer=True, data_parallel_sharding_strategy=strategy
    )
    wrapped = [FullyShardedDataParallel(config, sharding, Float16Module(config, chunk)) for chunk in chunks]
    config.no_sync_func = wrapped[0].no_sync
    config.finalize_model_grads_func = lambda chunks, *args, **kwargs: [chunk.finish_grad_sync() for chunk in chunks]
    return wrapped


def _captured_schedule() -> Any:
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper
    from megatron.core.pipeline_parallel import get_forward_backward_func

    wrapper = FullCudaGraphWrapper(get_forward_backward_func(), cuda_graph_warmup_steps=WARMUP)
    wrapper.data_read = lambda data_iterator, *_: data_iterator  # the batch stays where it is
    return wrapper
