# SPDX-License-Identifier: Apache-2.0
"""Training steps of which megatron-core captures CUDA graphs, with and without offload, beside its own offload.

python benchmarks/run.py captured [--graphs layers|step] [--modules NAME ...] [--contenders NAME ...] [--rounds N]

`layers`: TransformerEngine captures attention and router of each layer, and experts run eagerly between them (64 small
experts a layer). `step`: one graph of the whole step of dense layers. Contenders take turns, each in a process of its
own: `none`, `ours` and `incumbent`. Needs a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.apart import run_apart
from benchmarks.flags import add_flags, new_parser
from benchmarks.gpu.settings import SETUPS, Shape
from benchmarks.records import Records
from benchmarks.tables import Column, show, table

if TYPE_CHECKING:
    from offload_engine import OffloadEngine
    from offload_engine.captured_layers import CapturedLayers

CONTENDERS = ("none", "ours", "incumbent")
SECONDS, HOST_BYTES = 240.0, 100 << 30  # of one process
WARMUP = 4  # eager steps before the capture; megatron-core's default is 3
_SHAPES = {"layers": replace(SETUPS["fine-2"].shape, pp=1, vpp=0, ep=1), "step": SETUPS["a"].shape}
_MODULES = {"layers": ("core_attn", "attn_proj", "expert_fc1", "moe_act"), "step": ("qkv_linear",)}
_SCOPES = ["attn", "moe_router"]
_COLUMNS: dict[str, Column] = {
    "contender": "contender",
    "failure": "failure",
    "step ms": lambda record: f"{statistics.median(record.get('step_ms', [0])):.1f}",
    "host ms": lambda record: f"{statistics.median(record.get('host_ms', [0])):.1f}",
    "reserved MiB": ("reserved_bytes", "MiB"),
    "allocated MiB": ("allocated_bytes", "MiB"),
    "on host MiB": ("moved_bytes", "MiB"),
    "around a replay us": lambda record: _mean_and_median(record.get("around_replays_us")),
    "loss": ("loss", ".6f"),
}


def _mean_and_median(values: list[float] | None) -> str:
    return f"{statistics.mean(values):.1f}, median {statistics.median(values):.1f}" if values else ""


class Job(NamedTuple):
    """What one process does."""

    contender: str
    graphs: str
    shape: Shape
    modules: tuple[str, ...]
    num_steps: int


def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser("captured", __doc__)
    parser.add_argument("--graphs", choices=sorted(_SHAPES), default="layers", help="what is captured")
    parser.add_argument("--modules", nargs="+", metavar="NAME", help="to offload")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    add_flags(
        parser,
        ("--rounds", int, 2, "turns of each contender"),
        ("--iters", int, 8, "timed steps of a turn"),
        *((f"--{name}", int, None, "in place of the setup's") for name in ("layers", "nmb", "seq")),
        ("--json", Path, None, "append a record of each turn to this file"),
    )
    options = parser.parse_args(arguments)
    import torch
    from tqdm import tqdm

    if not torch.cuda.is_available():
        print("this benchmark needs a GPU", file=sys.stderr)
        return 2
    shape = replace(_SHAPES[options.graphs], **{k: v for k in ("layers", "nmb", "seq") if (v := getattr(options, k))})
    modules = tuple(options.modules or _MODULES[options.graphs])
    records = Records(options.json)
    for name in tqdm(list(options.contenders) * options.rounds, desc=f"captured {options.graphs}", unit="process"):
        job = Job(name, options.graphs, shape, modules, options.iters)
        ended = run_apart(_measure, job, seconds=SECONDS, host_bytes=HOST_BYTES)
        about = {"contender": name, "graphs": options.graphs, "failure": ended.failure}
        records.write([{**about, **(ended.value or {})}])
    sizes = f"{shape.layers} layers, {shape.seq} tokens, {shape.nmb} microbatches"
    show(table(f"{torch.cuda.get_device_name()}, {sizes}, offload of {' '.join(modules)}", _COLUMNS, records))
    return int(any(record["failure"] for record in records))


def _measure(job: Job) -> dict[str, Any]:
    os.environ.setdefault("NVTE_CPU_OFFLOAD_V1", "1")
    import torch

    from benchmarks.gpu.measure import timed_steps
    from benchmarks.gpu.model import start_ranks

    ranks = start_ranks(job.shape, deterministic=False, share_gpus=False)
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
        layers = () if engine is None else engine.graphs.layers
        step_ms, host_ms, losses = timed_steps(job.num_steps, training.step, torch.cuda.synchronize)
        found = {
            "step_ms": step_ms,
            "host_ms": host_ms,
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "moved_bytes": _moved_bytes(job, engine),
            "loss": sum(value.item() for value in losses),
            "around_replays_us": _around_replays_us(training, layers),
        }
        training.close()
    return found


def _around_replays_us(training: _Training, layers: Sequence[CapturedLayers]) -> list[float]:
    """Return the host's time around the replay of each graph in a step, in front of it and behind it together."""
    seconds: list[float] = []

    def timed(call: Callable[[int], None]) -> Callable[[int], None]:
        def run(number: int) -> None:
            begin = time.perf_counter()
            call(number)
            seconds.append(time.perf_counter() - begin)

        return run

    for captured in layers:
        captured.before, captured.after = timed(captured.before), timed(captured.after)
    training.step()
    return [1e6 * (before + after) for before, after in zip(seconds[0::2], seconds[1::2], strict=True)]


@contextlib.contextmanager
def _offload(job: Job) -> Iterator[Callable[[], OffloadEngine | None]]:
    """Put ours on, where it is the contender; yield what returns its engine."""
    if job.contender != "ours":
        yield lambda: None
        return
    from megatron_patches import apply
    from offload_engine import OffloadConfig

    with apply(OffloadConfig(), modules=job.modules) as handle:
        yield lambda: handle.engine


def _moved_bytes(job: Job, engine: OffloadEngine | None) -> int | None:
    """Return the bytes on the host, where they are counted."""
    if engine is None:
        return None if job.contender == "incumbent" else 0
    layers = sum(layers.copied_out_bytes for layers in engine.graphs.layers)
    return int(engine.stats.copied_out_bytes) + layers * job.shape.nmb


class _Training:
    """The model, its graphs, and a step of it."""

    def __init__(self, job: Job) -> None:
        import torch
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        from benchmarks.gpu.model import Training, build_chunks, make_config

        self._job = job
        self._has_layers = job.graphs == "layers"
        settings: dict[str, Any] = {"cuda_graph_warmup_steps": WARMUP}
        if self._has_layers:
            settings |= {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": _SCOPES}
        else:
            settings["cuda_graph_impl"] = "full_iteration"
        if job.contender == "incumbent":
            settings |= {"fine_grained_activation_offloading": True, "offload_modules": list(job.modules)}
            settings["delay_offload_until_cuda_graph"] = self._has_layers
        # Every contender has the same weights, with generators that its graphs can register.
        torch.manual_seed(1)
        trackers = {"te_rng_tracker": self._has_layers, "use_cudagraphable_rng": not self._has_layers}
        model_parallel_cuda_manual_seed(1, **trackers, force_reset_rng=True)
        self._config = make_config(job.shape, False, **settings)
        self._chunks = _with_gradients(build_chunks(job.shape, self._config), self._config, job.graphs)
        self._training = Training(job.shape, self._chunks, keeps_gradients=True)
        self._graphs: Any = None
        self._schedule: Any = None if self._has_layers else _captured_schedule()

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


def _with_gradients(chunks: list[Any], config: Any, graphs: str) -> list[Any]:
    """Give all parameters gradients that stay where they are, as in megatron-core's training."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    if graphs == "layers":
        parallel = DistributedDataParallelConfig(grad_reduce_in_fp32=False)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.synchronize()
            wrapped = [DistributedDataParallel(config, parallel, Float16Module(config, chunk)) for chunk in chunks]
            torch.cuda.synchronize()
        return wrapped
    for chunk in chunks:
        grads = [torch.zeros_like(parameter) for parameter in chunk.parameters()]
        for parameter, grad in zip(chunk.parameters(), grads, strict=True):
            parameter.grad = grad
        chunk.zero_grad_buffer = lambda grads=grads: torch._foreach_zero_(grads)
    return chunks


def _captured_schedule() -> Any:
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper
    from megatron.core.pipeline_parallel import get_forward_backward_func

    wrapper = FullCudaGraphWrapper(get_forward_backward_func(), cuda_graph_warmup_steps=WARMUP)
    wrapper.data_read = lambda data_iterator, *_: data_iterator  # the batch stays where it is
    return wrapper
