# SPDX-License-Identifier: Apache-2.0
"""Figures of the engine on a machine without a GPU: a benchmark, not a test.

    python benchmarks/run.py cpu cost --json bench.jsonl

cost      Python time that the engine takes for one group, with copies that do nothing
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.flags import add_flags, new_parser, output_file
from benchmarks.group_cost import forward_groups
from benchmarks.records import Records
from benchmarks.tables import Column, show, table
from offload_engine import IS_COMPILED, IterationStats, OffloadConfig, OffloadEngine
from offload_engine._devices.regions import new_buffer


@dataclass(frozen=True)
class Figure:
    """One measured value, and what it ought to be."""

    benchmark: str
    what: str
    value: float
    unit: str
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


# ---- the command line ----

_COLUMNS: dict[str, Column] = {
    "what": "what",
    "value": lambda f: f"{f['value']:,.1f} {f['unit']}",
    "target": "target",
    "met": "is_met",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser("cpu", __doc__)
    parser.add_argument("benchmark", nargs="?", choices=["cost"], default="cost", help="the only one")
    add_flags(parser, ("--json", output_file, None, "append one JSON object a figure"))
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    records = Records(args.json)
    records.write(asdict(figure) | {"is_compiled": IS_COMPILED} for figure in bench_cost())
    core = "compiled" if IS_COMPILED else "pure Python"
    show(table(f"offload engine on the CPU, core {core}", _COLUMNS, records))
    return 0


def _progress(values: Iterable[Any], label: str) -> Iterable[Any]:
    return tqdm(values, desc=label, leave=False)
