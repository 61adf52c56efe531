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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.group_cost import forward_groups
from offload_engine import (
    IS_COMPILED,
    Action,
    ChunkKey,
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

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
T = TypeVar("T")


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

    class Slab:
        def __init__(self, nbytes: int) -> None:
            self.nbytes = nbytes

        def close(self) -> None: ...

    def new_stream(self, name: str) -> str:
        return name

    def current_stream(self) -> str:
        return "compute"

    def record_event(self, stream: str) -> str:
        return stream

    def wait_event(self, stream: str, event: str) -> None: ...

    def wait_stream(self, stream: str, leader: str) -> None: ...

    def is_copy_thread(self) -> bool:
        return False

    def is_complete(self, event: str) -> bool:
        return True

    def synchronize(self, event: str) -> None: ...

    def mark_time(self, stream: str) -> float:
        return 0.0

    def milliseconds_between(self, first: float, last: float) -> float:
        return 0.0

    def allocate(self, nbytes: int, stream: str, spec: Any = None) -> torch.Tensor:
        return new_buffer(nbytes, spec, self.torch_device)

    def copy_out(self, stream: str, copies: Sequence[tuple[torch.Tensor, Any]]) -> str:
        return stream

    def copy_in(self, stream: str, copies: Sequence[tuple[Any, torch.Tensor]]) -> str:
        return stream

    def free_host_bytes(self) -> int:
        return 1 << 40

    def new_slab(self, nbytes: int) -> InstantDevice.Slab:
        return self.Slab(nbytes)

    def close(self) -> None: ...


def bench_cost(repeats: int = 60, num_groups: int = 64) -> list[Figure]:
    """Measure the cost of one group, forward and backward: the best of many repeats, as noise only adds."""
    gc.disable()
    with OffloadEngineFor(InstantDevice()) as engine:
        calls = min(_time_handler_calls(engine, num_groups) for _ in _progress(range(repeats), "cost, handler calls"))
        marked = unmarked = float("inf")
        for _ in _progress(range(repeats), "cost, through autograd"):
            marked = min(marked, _time_autograd(engine, num_groups, is_marked=True))
            unmarked = min(unmarked, _time_autograd(engine, num_groups, is_marked=False))
    gc.enable()
    return [
        Figure(
            "cost",
            "handler calls of a group: start, pack 3, commit, prefetch, unpack 3",
            calls,
            "us",
            "< 60",
            calls < 60,
        ),
        Figure("cost", "the same through autograd: hooks and the mark at its end included", marked - unmarked, "us"),
    ]


class OffloadEngineFor:
    """An engine on `device` that moves every tensor; closed at the end."""

    def __init__(self, device: Any) -> None:
        self._engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0), device=device)

    def __enter__(self) -> OffloadEngine:
        return self._engine

    def __exit__(self, *exc_info: object) -> None:
        self._engine.close()


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


@dataclass(frozen=True)
class Shape:
    """A stack of MLP blocks on rank 0 of a 1F1B pipeline."""

    layers: int
    tokens: int
    hidden: int
    num_stages: int
    num_microbatches: int

    def order(self) -> list[Action]:
        """List forwards and backwards of rank 0: as many forwards ahead as there are stages."""
        chunks = [ChunkKey(0, m) for m in range(self.num_microbatches)]
        ahead = min(self.num_stages, self.num_microbatches)
        actions = [Action("F", chunk) for chunk in chunks[:ahead]]
        for m, chunk in enumerate(chunks):
            actions.append(Action("B", chunk))
            if m + ahead < len(chunks):
                actions.append(Action("F", chunks[m + ahead]))
        return actions


MEMORY_SHAPE = Shape(layers=16, tokens=512, hidden=256, num_stages=8, num_microbatches=12)
RSS_SHAPE = Shape(layers=8, tokens=1024, hidden=512, num_stages=8, num_microbatches=9)


class Block(torch.nn.Module):
    """Residual MLP whose three parts save one tensor each; `run` brackets one call of a part."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleDict(
            {
                "norm": torch.nn.LayerNorm(hidden),
                "fc1": torch.nn.Linear(hidden, 2 * hidden),
                "act": torch.nn.GELU(),
                "fc2": torch.nn.Linear(2 * hidden, hidden),
            }
        )

    def forward(
        self, x: torch.Tensor, run: Callable[[torch.nn.Module, torch.Tensor, str], torch.Tensor]
    ) -> torch.Tensor:
        out = x
        for name, part in self.parts.items():
            out = run(part, out, name)
        return x + out


def train_rank(
    shape: Shape, config: OffloadConfig | None, num_steps: int = 2
) -> tuple[IterationStats, int, list[float]]:
    """Run the rank's order of chunks; return the last step's counters, its peak of saved bytes, and the losses."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList(Block(shape.hidden) for _ in range(shape.layers))
    inputs = [torch.randn(shape.tokens, shape.hidden) for _ in range(shape.num_microbatches)]
    meter, losses, stats = ResidencyMeter(), [], IterationStats()
    engine = OffloadEngine(config, meter=meter) if config else None
    for _ in _progress(range(num_steps), _label(config)):
        meter.reset_peak()
        if engine is None:
            losses.append(_run_step(model, inputs, shape, None, meter))
            continue
        with engine.iteration(shape.order(), weights=model.parameters()):
            losses.append(_run_step(model, inputs, shape, engine, meter))
        stats = engine.stats
    if engine:
        engine.close()
    return stats, meter.peak_bytes, losses


def _run_step(
    model: torch.nn.ModuleList,
    inputs: list[torch.Tensor],
    shape: Shape,
    engine: OffloadEngine | None,
    meter: ResidencyMeter,
) -> float:
    outputs: dict[ChunkKey, torch.Tensor] = {}
    total = 0.0
    for kind, chunk in shape.order():
        if kind == "B":
            outputs.pop(chunk).backward()
            continue
        run = _bracket(engine.start_chunk(chunk)) if engine else _call
        with SavedTensorTracker(meter, model.parameters()):
            out = inputs[chunk.microbatch]
            for block in model:
                out = block(out, run)
            outputs[chunk] = out.square().mean()
        total += outputs[chunk].item()
    return total


def _call(part: torch.nn.Module, x: torch.Tensor, name: str) -> torch.Tensor:
    return part(x)


def _bracket(chunk: ChunkOffloadHandler) -> Callable[[torch.nn.Module, torch.Tensor, str], torch.Tensor]:
    def run(part: torch.nn.Module, x: torch.Tensor, name: str) -> torch.Tensor:
        x = group_start(x, chunk, name)
        with chunk.saved_tensors_hooks():
            out = part(x)
        return group_commit(out, chunk)

    return run


def _label(config: OffloadConfig | None) -> str:
    return "no offload" if config is None else "dry run" if config.dry_run else "offload"


def bench_memory() -> list[Figure]:
    """Measure how much of what the groups save is gone at the peak."""
    shape, config = MEMORY_SHAPE, OffloadConfig(min_tensor_bytes=0)
    dry, dry_peak, dry_losses = train_rank(shape, config.replace(dry_run=True))
    wet, wet_peak, wet_losses = train_rank(shape, config)
    return [
        *_fall("memory", dry_peak, wet_peak, dry.peak_resident_bytes, 0),
        Figure(
            "memory",
            "losses equal to the last bit",
            _yes(dry_losses == wet_losses),
            "",
            "yes",
            dry_losses == wet_losses,
        ),
    ]


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

OFFLOAD = ("--offload-activation", "--offload-modules", "core_attn", "router_fc1", "qkv_linear")
TINY = ("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64")
DEEP = ("--num-layers", "48", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "256")
MOE = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-layer-freq", "2")
RECOMPUTED_NORMS = ("--recompute-granularity", "selective", "--recompute-modules", "layernorm")
NUM_MICROBATCHES = 8


@dataclass(frozen=True)
class Pipeline:
    """How many processes, and how many virtual stages in each."""

    num_ranks: int
    num_virtual_stages: int | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        virtual = self.num_virtual_stages
        stages = () if virtual is None else ("--num-virtual-stages-per-pipeline-rank", str(virtual))
        return ("--pipeline-model-parallel-size", str(self.num_ranks), *stages)

    def __str__(self) -> str:
        return f"PP={self.num_ranks}" + (f" VPP={self.num_virtual_stages}" if self.num_virtual_stages else "")


class Trainer:
    """Runs examples/pretrain_gpt.py on text that it prepares once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._data = directory / "text"
        script = ROOT / "examples" / "prepare_text.py"
        self._call([str(script), "--output-prefix", str(self._data)])

    def train(self, pipeline: Pipeline, flags: Sequence[str]) -> list[dict[str, Any]]:
        """Train; return the metrics of each step."""
        metrics = self._directory / "metrics.jsonl"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        launcher += ["--nproc-per-node", str(pipeline.num_ranks)]
        script = [str(ROOT / "examples" / "pretrain_gpt.py"), "--disable-bias-linear", "--data-path", str(self._data)]
        self._call([*launcher, *script, "--metrics-json", str(metrics), *pipeline.flags, *flags])
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        return [record for record in records if "loss" in record]

    def _call(self, command: Sequence[str]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *command], env=environment, stderr=subprocess.PIPE, text=True, stdout=subprocess.DEVNULL
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")


def bench_megatron() -> list[Figure]:
    """Measure the peak of resident saved bytes of each rank of the trainer, without and with offload of everything.

    What is left of the groups is the window: the group that runs, copies under way, and copies ahead of their use. It
    is a few groups whatever the model, so the share that goes grows with depth: 12 layers a chunk here (4 give 90%).
    """
    pipeline = Pipeline(2, 2)
    sizes = ("--micro-batch-size", "1", "--global-batch-size", str(NUM_MICROBATCHES), "--train-iters", "3")
    flags = (*DEEP, *MOE, *sizes, *OFFLOAD, "--offload-min-tensor-bytes", "0")
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(Path(directory))
        modes = {"dry run": (*flags, "--offload-dry-run"), "offload": flags}
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
    models = {"dense": (), "moe": MOE[:4], "mixed": MOE}
    formats = {"fp32": (), "bf16": ("--bf16",)}
    recomputations = {"": (), "recomputed norms": RECOMPUTED_NORMS}
    grid = list(itertools.product(pipelines, models, formats, recomputations))
    figures = []
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(Path(directory))
        for pipeline, model, number, recomputation in _progress(grid, "parity"):
            setting = (*models[model], *formats[number], *recomputations[recomputation])
            flags = (*TINY, *setting, *_growing_batches(pipeline), "--eval-interval", "1", "--eval-iters", "1")
            # What feeds on the output of a norm is recomputed with it.
            names = ["core_attn", "attn_proj", *(() if recomputation else ("qkv_linear",))]
            names += [] if model == "dense" else ["router_fc1"]
            offload = ("--offload-activation", "--offload-modules", *names, "--offload-min-tensor-bytes", "0")
            plain, moved = (trainer.train(pipeline, (*flags, *extra)) for extra in ((), offload))
            figures.append(_parity(f"{pipeline} {model} {number} {recomputation}".rstrip(), plain, moved))
    return figures


def _growing_batches(pipeline: Pipeline) -> tuple[str, ...]:
    """List five steps of 1, 2, 4, 8, 9 microbatches; 2, 4 and 8 where they have to fill the interleaved schedule."""
    if pipeline.num_virtual_stages is None:
        ramp, largest = ("1", "1", "8"), "9"
    else:
        ramp, largest = ("2", "2", "6"), "8"
    return (
        "--micro-batch-size",
        "1",
        "--global-batch-size",
        largest,
        "--rampup-batch-size",
        *ramp,
        "--train-iters",
        "5",
    )


def _parity(what: str, plain: list[dict[str, Any]], moved: list[dict[str, Any]]) -> Figure:
    results = [[(step["loss"], step["grad_norm"], step["validation_loss"]) for step in run] for run in (plain, moved)]
    has_moved = moved[-1]["offload"]["copied_out_bytes"] > 0
    is_equal = results[0] == results[1] and has_moved
    return Figure(
        "parity", what, "equal" if is_equal else "DIFFERENT" if has_moved else "NOTHING MOVED", "", "equal", is_equal
    )


# ---- the command line ----

BENCHMARKS: dict[str, Callable[[], list[Figure]]] = {
    "cost": bench_cost,
    "memory": bench_memory,
    "rss": bench_rss,
    "megatron": bench_megatron,
    "parity": bench_parity,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks/run.py cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benchmarks", nargs="*", metavar="NAME", help="which ones; default all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one JSON object a figure")
    parser.add_argument("--rss-child", choices=["plain", "offload"], help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if args.rss_child:
        _rss_child(args.rss_child)
        return 0
    unknown = set(args.benchmarks) - set(BENCHMARKS)
    if unknown:
        parser.error(f"unknown benchmark {sorted(unknown)}; there are {', '.join(BENCHMARKS)}")
    figures = [f for name in args.benchmarks or BENCHMARKS for f in BENCHMARKS[name]()]
    if args.json:
        with args.json.open("a") as file:
            file.writelines(json.dumps(asdict(figure) | {"is_compiled": IS_COMPILED}) + "\n" for figure in figures)
    Console().print(_table(figures))
    return 0


def _table(figures: Sequence[Figure]) -> Table:
    core = "compiled" if IS_COMPILED else "pure Python"
    table = Table(title=f"offload engine on the CPU, core {core}", title_justify="left")
    for column, justify in (
        ("benchmark", "left"),
        ("what", "left"),
        ("value", "right"),
        ("target", "right"),
        ("", "left"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for figure in figures:
        value = figure.value if isinstance(figure.value, str) else f"{figure.value:,.1f} {figure.unit}"
        verdict = "" if figure.is_met is None else "[green]met[/]" if figure.is_met else "[bold red]MISSED[/]"
        table.add_row(figure.benchmark, figure.what, value, figure.target, verdict)
    return table


def _progress(values: Sequence[T] | range, label: str) -> Iterator[T]:
    yield from tqdm(values, desc=label, leave=False)


def _yes(value: bool) -> str:
    return "yes" if value else "no"
