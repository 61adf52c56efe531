# SPDX-License-Identifier: Apache-2.0
"""Figures of the engine on a machine without a GPU: a benchmark, not a test.

    python benchmarks/run.py cpu                       everything, a table on the terminal
    python benchmarks/run.py cpu cost memory --json bench.jsonl

cost      Python time the engine takes for one group, with copies that do nothing
memory    peak resident saved bytes of one pipeline rank: what offload takes away of what it could
rss       peak memory of a process (VmHWM) that trains with and without offload
megatron  the same for the trainer in examples/, PP=2 and VPP=2, two processes
parity    losses and gradient norms of the trainer, with and without offload, over a grid of pipelines
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from benchmarks.flags import add_flags, new_parser
from benchmarks.group_cost import forward_groups
from benchmarks.records import Records
from benchmarks.tables import MIB, Column, Record, show, shown, table
from offload_engine import (
    IS_COMPILED,
    Action,
    ChunkOffloadHandler,
    IterationStats,
    OffloadConfig,
    OffloadEngine,
    ResidencyMeter,
    SavedTensorTracker,
    group_commit,
    group_start,
)
from offload_engine._devices.regions import new_buffer
from offload_engine.schedule import one_forward_one_backward

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Figure:
    """One measured value, and what it ought to be."""

    benchmark: str
    what: str
    value: float | str
    unit: str = ""
    target: str = ""
    is_met: bool | None = None


# ---- cost: Python time of one group ----


class InstantDevice:
    """A device whose copies take no time and move nothing: what is left is the engine's own cost."""

    torch_device = torch.device("cpu")
    host_alignment = 64
    memory = graphs = None

    # Each with its own arguments: to pack any takes longer than a call.
    def new_stream(self, name: str) -> str:
        return name

    def current_stream(self) -> str:
        return "compute"

    def record_event(self, stream: str) -> str:
        return stream

    def wait_event(self, stream: str, event: str) -> None: ...

    def wait_stream(self, stream: str, leader: str) -> None: ...

    def synchronize(self, event: str) -> None: ...

    def copy_out(self, stream: str, copies: Sequence[tuple[torch.Tensor, Any]]) -> str:
        return stream

    def copy_in(self, stream: str, copies: Sequence[tuple[Any, torch.Tensor]]) -> str:
        return stream

    def mark_time(self, stream: str) -> float:
        return 0.0

    def milliseconds_between(self, first: float, last: float) -> float:
        return 0.0

    def is_copy_thread(self) -> bool:
        return False

    def is_complete(self, event: str) -> bool:
        return True

    def allocate(self, nbytes: int, stream: str, spec: Any = None) -> torch.Tensor:
        return new_buffer(nbytes, spec, self.torch_device)

    def free_host_bytes(self) -> int:
        return 1 << 40

    def new_slab(self, nbytes: int) -> Any:
        return SimpleNamespace(nbytes=nbytes, close=lambda: None)

    def close(self) -> None: ...


def bench_cost(repeats: int = 60, num_groups: int = 64) -> list[Figure]:
    """Measure the cost of one group, forward and backward: the best of many repeats, as noise only adds."""
    gc.disable()
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0), device=InstantDevice())  # type: ignore[arg-type]
    try:
        repeated = _progress(range(repeats), "cost, handler calls")
        calls = min(_time_handler_calls(engine, num_groups) for _ in repeated)
        marked = unmarked = float("inf")
        for _ in _progress(range(repeats), "cost, through autograd"):
            marked = min(marked, _time_autograd(engine, num_groups, is_marked=True))
            unmarked = min(unmarked, _time_autograd(engine, num_groups, is_marked=False))
    finally:
        engine.close()
    gc.enable()
    what = "handler calls of a group: start, pack 3, commit, prefetch, unpack 3"
    through = "the same through autograd: hooks and the mark at its end included"
    return [
        Figure("cost", what, calls, "us", "< 60", calls < 60),
        Figure("cost", through, marked - unmarked, "us"),
    ]


def _time_handler_calls(engine: OffloadEngine, num_groups: int) -> float:
    tensors = _tiny_tensors(num_groups)
    engine.begin_iteration()
    begin = time.perf_counter()
    chunk = engine.start_chunk()
    packed = []
    for saved in tensors:
        group = chunk.open_group("module")
        handles = [chunk.tensor_push(tensor) for tensor in saved]
        chunk.close_group()
        packed.append((group, handles))
    del saved, handles
    tensors.clear()
    while packed:
        group, handles = packed.pop()
        chunk.on_group_commit_backward(group)
        for handle in handles:
            chunk.tensor_pop(handle)
        del handle, handles
        chunk.on_group_start_backward()
    end = time.perf_counter()
    _check_all_moved(engine.end_iteration(), num_groups)
    return (end - begin) / num_groups * 1e6


def _time_autograd(engine: OffloadEngine, num_groups: int, is_marked: bool) -> float:
    tensors = _tiny_tensors(num_groups)
    x = torch.ones(8, requires_grad=True)
    engine.begin_iteration()
    begin = time.perf_counter()
    chunk = engine.start_chunk()
    out = forward_groups(x, tensors, chunk if is_marked else None)
    out.backward(torch.ones(8))
    end = time.perf_counter()
    stats = engine.end_iteration()
    if is_marked:
        _check_all_moved(stats, num_groups)
    return (end - begin) / num_groups * 1e6


def _tiny_tensors(num_groups: int) -> list[list[torch.Tensor]]:
    return [[torch.empty(64) for _ in range(3)] for _ in range(num_groups)]


def _check_all_moved(stats: IterationStats, num_groups: int) -> None:
    expected = num_groups * 3 * 64 * 4
    if stats.copied_out_bytes != expected:
        raise RuntimeError(f"the benchmark is not measuring offload: {stats}")


# ---- memory and rss: one rank of a pipeline, in plain PyTorch ----


class Shape(NamedTuple):
    """A stack of MLP blocks on rank 0 of a 1F1B pipeline."""

    layers: int
    tokens: int
    hidden: int
    num_stages: int
    num_microbatches: int


MEMORY_SHAPE = Shape(layers=16, tokens=512, hidden=256, num_stages=8, num_microbatches=12)
RSS_SHAPE = Shape(layers=8, tokens=1024, hidden=512, num_stages=8, num_microbatches=9)


class Block(torch.nn.Module):
    """Residual MLP whose parts save one tensor each; each part is a group of the chunk, if there is one."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        fc1, fc2 = torch.nn.Linear(hidden, 2 * hidden), torch.nn.Linear(2 * hidden, hidden)
        parts = {"norm": torch.nn.LayerNorm(hidden), "fc1": fc1, "act": torch.nn.GELU(), "fc2": fc2}
        self.parts = torch.nn.ModuleDict(parts)

    def forward(self, x: torch.Tensor, chunk: ChunkOffloadHandler | None) -> torch.Tensor:
        out = x
        for name, part in self.parts.items():
            if chunk is None:
                out = part(out)
                continue
            out = group_start(out, chunk, name)
            with chunk.saved_tensors_hooks():
                out = part(out)
            out = group_commit(out, chunk)
        return x + out


def train_rank(
    shape: Shape, config: OffloadConfig | None, num_steps: int = 2
) -> tuple[IterationStats, int, list[float]]:
    """Run the rank's order of chunks; return the last step's counters, its peak of saved bytes, and the losses."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList(Block(shape.hidden) for _ in range(shape.layers))
    inputs = [torch.randn(shape.tokens, shape.hidden) for _ in range(shape.num_microbatches)]
    order = one_forward_one_backward(shape.num_stages, 0, shape.num_microbatches)
    meter, losses, stats = ResidencyMeter(), [], IterationStats()
    engine = OffloadEngine(config, meter=meter) if config else None
    for _ in _progress(range(num_steps), "train"):
        meter.reset_peak()
        if engine is None:
            losses.append(_run_step(model, inputs, order, None, meter))
            continue
        with engine.iteration(order, weights=model.parameters()):
            losses.append(_run_step(model, inputs, order, engine, meter))
        stats = engine.stats
    if engine:
        engine.close()
    return stats, meter.peak_bytes, losses


def _run_step(
    model: torch.nn.ModuleList,
    inputs: Sequence[torch.Tensor],
    order: Sequence[Action],
    engine: OffloadEngine | None,
    meter: ResidencyMeter,
) -> float:
    outputs: dict[Any, torch.Tensor] = {}
    total = 0.0
    for kind, key in order:
        if kind == "B":
            outputs.pop(key).backward()
            continue
        chunk = engine.start_chunk(key) if engine else None
        with SavedTensorTracker(meter, model.parameters()):
            out = inputs[key.microbatch]
            for block in model:
                out = block(out, chunk)
            outputs[key] = out.square().mean()
        total += outputs[key].item()
    return total


def bench_memory() -> list[Figure]:
    """Measure how much of what the groups save is gone at the peak."""
    shape, config = MEMORY_SHAPE, OffloadConfig(min_tensor_bytes=0)
    dry, dry_peak, dry_losses = train_rank(shape, config.replace(dry_run=True))
    wet, wet_peak, wet_losses = train_rank(shape, config)
    is_equal = dry_losses == wet_losses
    equal = Figure("memory", "losses equal to the last bit", shown(is_equal), "", "yes", is_equal)
    return [*_fall("memory", dry_peak, wet_peak, dry.peak_resident_bytes, 0), equal]


def _fall(benchmark: str, before: int, after: int, managed: int, kept: int) -> list[Figure]:
    """Compare the peaks of all saved bytes before and after with the bytes of the groups at the peak."""
    share = (before - after) / (managed - kept)
    return [
        Figure(benchmark, "saved bytes at the peak, nothing moved", before / MIB, "MiB"),
        Figure(benchmark, "  of the offloaded modules", managed / MIB, "MiB"),
        Figure(benchmark, "  of these, of groups that stay on purpose", kept / MIB, "MiB"),
        Figure(benchmark, "saved bytes at the peak, with offload", after / MIB, "MiB"),
        Figure(benchmark, "peak fell by", (before - after) / MIB, "MiB"),
        Figure(benchmark, "peak fell by, of what may move", 100 * share, "%", ">= 95", share >= 0.95),
    ]


def bench_rss() -> list[Figure]:
    """Measure the peak memory of a process of its own, once without and once with offload."""
    before, after = (_child_peak(mode) for mode in ("plain", "offload"))
    return [
        Figure("rss", "peak RSS, no offload", before / MIB, "MiB"),
        Figure("rss", "peak RSS, offload", after / MIB, "MiB", "lower", after < before),
    ]


def _child_peak(mode: str) -> int:
    # Freed blocks go back to the system at once, in both modes: else glibc keeps those of up to 32 MiB.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(256 * 1024)}
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "cpu", "--rss-child", mode]
    return int(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout)


def _rss_child(mode: str) -> None:
    train_rank(RSS_SHAPE, OffloadConfig(min_tensor_bytes=0) if mode == "offload" else None)
    peak_kib = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(int(peak_kib.split()[1]) * 1024)


# ---- megatron and parity: the trainer in examples/ ----

OFFLOAD = "--offload-activation --offload-modules core_attn router_fc1 qkv_linear".split()
TINY = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64".split()
DEEP = "--num-layers 48 --hidden-size 64 --num-attention-heads 4 --seq-length 256".split()
MOE = "--num-experts 4 --moe-router-topk 2".split()
MIXED = [*MOE, "--moe-layer-freq", "2"]
RECOMPUTED_NORMS = "--recompute-granularity selective --recompute-modules layernorm".split()
NUM_MICROBATCHES = 8


class Pipeline(NamedTuple):
    """How many processes, and how many virtual stages in each."""

    num_ranks: int
    num_virtual_stages: int = 0

    def __str__(self) -> str:
        return f"PP={self.num_ranks}" + (f" VPP={self.num_virtual_stages}" if self.num_virtual_stages else "")


class Trainer:
    """Runs examples/pretrain_gpt.py on text that it prepares once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._data = str(directory / "text")
        self._call([str(ROOT / "examples/prepare_text.py"), "--output-prefix", self._data])

    def train(self, pipeline: Pipeline, flags: Sequence[str]) -> list[Record]:
        """Train; return the metrics of each step."""
        metrics = self._directory / "metrics.jsonl"
        launcher = "-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node".split()
        script = [str(ROOT / "examples/pretrain_gpt.py"), "--disable-bias-linear", "--data-path", self._data]
        stages = ["--pipeline-model-parallel-size", str(pipeline.num_ranks), "--metrics-json", str(metrics)]
        if pipeline.num_virtual_stages:
            stages += ["--num-virtual-stages-per-pipeline-rank", str(pipeline.num_virtual_stages)]
        self._call([*launcher, str(pipeline.num_ranks), *script, *stages, *flags])
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        return [record for record in records if "loss" in record]

    def _call(self, command: Sequence[str]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")


def bench_megatron() -> list[Figure]:
    """Measure the peak of resident saved bytes of each rank of the trainer, without and with offload of everything.

    What is left of the groups is the window: the group that runs, copies under way, and copies ahead of their use. It
    is a few groups whatever the model, so the share that goes grows with depth: 12 layers a chunk here (4 give 90%).
    """
    pipeline = Pipeline(2, 2)
    sizes = f"--micro-batch-size 1 --global-batch-size {NUM_MICROBATCHES} --train-iters 3 --offload-min-tensor-bytes 0"
    flags = [*DEEP, *MIXED, *sizes.split(), *OFFLOAD]
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(Path(directory))
        modes = {"dry run": [*flags, "--offload-dry-run"], "offload": flags}
        runs = {name: trainer.train(pipeline, modes[name])[-1] for name in _progress(list(modes), "megatron")}
    figures = []
    for rank, (dry, wet) in enumerate(zip(runs["dry run"]["ranks"], runs["offload"]["ranks"], strict=True)):
        before, after = (run["offload"]["peak_resident_saved_bytes"] for run in (dry, wet))
        # The groups that stay are those of the chunk whose backward comes at once: one microbatch's at a time.
        managed, kept = dry["offload"]["peak_resident_bytes"], wet["offload"]["kept_bytes"] // NUM_MICROBATCHES
        figures += _fall(f"megatron, rank {rank}", before, after, managed, kept)
    return figures


def bench_parity() -> list[Figure]:
    """Compare losses and gradient norms over pipelines, models, dtypes and recomputation; batches grow, and each step
    is evaluated. Gradients themselves are compared in tests/dist/test_parity.py.
    """
    pipelines = (Pipeline(1), Pipeline(2), Pipeline(2, 2))
    models = {"dense": [], "moe": MOE, "mixed": MIXED}
    formats = {"fp32": [], "bf16": ["--bf16"]}
    recomputations = {"": [], "recomputed norms": RECOMPUTED_NORMS}
    grid = list(itertools.product(pipelines, models, formats, recomputations))
    figures = []
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(Path(directory))
        for pipeline, model, number, recomputation in _progress(grid, "parity"):
            setting = [*models[model], *formats[number], *recomputations[recomputation]]
            # Five steps of 1, 2, 4, 8, 9 microbatches; 2, 4 and 8 where they have to fill the interleaved schedule.
            ramp, largest = ("2 2 6", 8) if pipeline.num_virtual_stages else ("1 1 8", 9)
            batches = f"--micro-batch-size 1 --global-batch-size {largest} --rampup-batch-size {ramp} --train-iters 5"
            flags = (*TINY, *setting, *batches.split(), "--eval-interval", "1", "--eval-iters", "1")
            # What feeds on the output of a norm is recomputed with it.
            names = ["core_attn", "attn_proj", *(() if recomputation else ("qkv_linear",))]
            names += [] if model == "dense" else ["router_fc1"]
            offload = ("--offload-activation", "--offload-modules", *names, "--offload-min-tensor-bytes", "0")
            plain, moved = (trainer.train(pipeline, (*flags, *extra)) for extra in ((), offload))
            figures.append(_parity(f"{pipeline} {model} {number} {recomputation}".rstrip(), plain, moved))
    return figures


def _parity(what: str, plain: list[Record], moved: list[Record]) -> Figure:
    results = [[(step["loss"], step["grad_norm"], step["validation_loss"]) for step in run] for run in (plain, moved)]
    has_moved = moved[-1]["offload"]["copied_out_bytes"] > 0
    is_equal = results[0] == results[1] and has_moved
    verdict = "equal" if is_equal else "DIFFERENT" if has_moved else "NOTHING MOVED"
    return Figure("parity", what, verdict, "", "equal", is_equal)


# ---- the command line ----

BENCHMARKS: dict[str, Callable[[], list[Figure]]] = {
    **{"cost": bench_cost, "memory": bench_memory, "rss": bench_rss},
    **{"megatron": bench_megatron, "parity": bench_parity},
}
_COLUMNS: dict[str, Column] = {
    "benchmark": "benchmark",
    "what": "what",
    "value": lambda f: f["value"] if isinstance(f["value"], str) else f"{f['value']:,.1f} {f['unit']}",
    "target": "target",
    "met": "is_met",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser("cpu", __doc__)
    parser.add_argument("benchmarks", nargs="*", metavar="NAME", help="which ones; default all")
    parser.add_argument("--rss-child", choices=["plain", "offload"], help=argparse.SUPPRESS)
    add_flags(parser, ("--json", Path, None, "append one JSON object a figure"))
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if args.rss_child:
        _rss_child(args.rss_child)
        return 0
    if unknown := set(args.benchmarks) - set(BENCHMARKS):
        parser.error(f"unknown benchmark {sorted(unknown)}; there are {', '.join(BENCHMARKS)}")
    records = Records(args.json)
    figures = [f for name in args.benchmarks or BENCHMARKS for f in BENCHMARKS[name]()]
    records.write(asdict(figure) | {"is_compiled": IS_COMPILED} for figure in figures)
    core = "compiled" if IS_COMPILED else "pure Python"
    show(table(f"offload engine on the CPU, core {core}", _COLUMNS, records))
    return 0


def _progress(values: Iterable[Any], label: str) -> Iterable[Any]:
    return tqdm(values, desc=label, leave=False)
