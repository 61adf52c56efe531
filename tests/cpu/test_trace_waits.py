# SPDX-License-Identifier: Apache-2.0
"""benchmarks/run.py trace_waits, on small traces of known content."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.trace_waits import caused, pauses, trace
from benchmarks.trace_waits.spans import Span, total, union, within, without

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "run.py"
MIB = 1 << 20
START = 5_000_000.0  # a profiler's clock does not begin at zero


def event(cat: str, name: str, begin: float, end: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": START + begin, "dur": end - begin, "tid": tid, "args": args}


def kernel(begin: float, end: float, stream: int = 7, name: str = "gemm", correlation: int = 0) -> dict[str, Any]:
    return event("kernel", name, begin, end, stream=stream, correlation=correlation)


def copy_out(begin: float, end: float, nbytes: int = 64 * MIB, correlation: int = 0) -> dict[str, Any]:
    name = "Memcpy DtoH (Device -> Pinned)"
    return event("gpu_memcpy", name, begin, end, stream=20, bytes=nbytes, correlation=correlation)


def call(name: str, begin: float, end: float, correlation: int = 0, tid: int = 1) -> dict[str, Any]:
    return event("cuda_runtime", name, begin, end, tid=tid, correlation=correlation)


FIRST = event("cpu_op", "aten::empty", 0, 1)  # the step begins here


def test_spans_are_sets_of_time() -> None:
    def points(spans: list[Span]) -> set[int]:
        return {point for span in spans for point in range(int(span.begin), int(span.end))}

    random.seed(1)
    for _ in range(200):
        one, other = (
            [Span(begin, begin + random.randrange(1, 9)) for begin in random.choices(range(60), k=5)] for _ in range(2)
        )
        bound = Span(20, 45)
        assert points(union(one)) == points(one) and total(union(one)) == len(points(one))
        assert points(within(union(one), bound)) == points(one) & points([bound])
        assert points(without(union(one), union(other))) == points(one) - points(other)


def test_a_wait_has_the_name_of_the_operation_that_made_it() -> None:
    read = event("cpu_op", "aten::item", 10, 60), event("cpu_op", "aten::_local_scalar_dense", 12, 58)
    calls = (
        call("cudaStreamSynchronize", 20, 55),
        call("cudaStreamSynchronize", 70, 75),
        call("cudaLaunchKernel", 80, 90),
    )
    assert trace.make_trace([FIRST, *read, *calls]).waits == [
        ("aten::item, cudaStreamSynchronize", Span(20, 55)),
        ("cudaStreamSynchronize", Span(70, 75)),
    ]


WAIT = call("cudaStreamSynchronize", 100, 1000)


@pytest.mark.parametrize(
    "events, what, caused_us",
    [
        pytest.param([kernel(0, 1000), copy_out(0, 2000), WAIT], "cudaStreamSynchronize", 0, id="computing"),
        pytest.param([kernel(0, 300), copy_out(0, 2000), WAIT], "cudaStreamSynchronize", 700, id="only-copying"),
        pytest.param(
            [*(kernel(begin, begin + 40) for begin in range(0, 1000, 50)), copy_out(0, 2000), WAIT],
            *("cudaStreamSynchronize", 0),
            id="pauses-between-kernels",
        ),
        pytest.param(
            [
                *(kernel(0, 5000), copy_out(0, 2000), copy_out(2005, 4000)),  # queued directly behind the first
                copy_out(4004, 4006, nbytes=256, correlation=9),
                call("cudaMemcpyAsync", 90, 95, correlation=9),
                call("cudaEventSynchronize", 100, 4010),
            ],
            *("cudaEventSynchronize", 4004 - 100),
            id="a-small-read-behind-large-copies",
        ),
        pytest.param(
            [
                *(kernel(0, 128), kernel(128, 130), copy_out(0, 2000)),
                *(call("cudaEventQuery", begin, begin + 2) for begin in range(100, 130, 5)),
            ],
            *("spin of cudaEventQuery", 0),
            id="a-read-by-a-kernel",
        ),
    ],
)
def test_what_copies_cause(events: list[dict[str, Any]], what: str, caused_us: float) -> None:
    one = caused.judge(trace.make_trace([FIRST, *events]))[-1]
    assert one.wait.what == what and one.caused_us == caused_us


def write_trace(file: Path, *events: dict[str, Any]) -> Path:
    content = json.dumps({"traceEvents": [FIRST, {"ph": "M", "name": "process_name"}, *events]})
    file.write_bytes(gzip.compress(content.encode()) if file.suffix == ".gz" else content.encode())
    return file


def chain(begins: list[float], *more: dict[str, Any], issued: dict[int, float] | None = None) -> trace.Trace:
    """Make kernels a, b, c... of 50 microseconds, launched at 1, 2, 3... or at what `issued` says."""
    kernels, calls = [], []
    for number, begin in enumerate(begins):
        kernels.append(kernel(begin, begin + 50, name=chr(ord("a") + number), correlation=number + 1))
        at = (issued or {}).get(number, 1.0 + number)
        calls.append(call("cudaLaunchKernel", at, at + 5, correlation=number + 1))
    return trace.make_trace([FIRST, *kernels, *calls, *more])


def compared(other: trace.Trace, reference: trace.Trace | None = None) -> dict[str, tuple[int, float, float]]:
    rows = pauses.compare(reference or chain([100, 152, 204, 256]), other)
    return {row["pause"]: (row["count"], row["reference_us"], row["total_us"]) for row in rows if row["count"]}


def test_pauses_and_kernels_are_told_apart_by_what_is_copied() -> None:
    copies = [copy_out(151, 156), {**copy_out(207, 210), "name": "Memcpy HtoD (Pinned -> Device)"}]
    found = compared(chain([100, 155, 209, 266], *copies))
    assert {pauses.OUT: (1, 2, 5), pauses.IN: (1, 2, 4), pauses.QUIET: (1, 2, 7)}.items() <= found.items()
    slow = ((100, 51, "a"), (152, 54, "b"), (207, 58, "c"))
    kernels = [kernel(begin, begin + took, name=name) for begin, took, name in slow]
    copies = [copy_out(170, 190), {**copy_out(230, 240), "name": "Memcpy HtoD (Pinned -> Device)"}]
    found = compared(trace.make_trace([FIRST, *kernels, *copies]), chain([100, 152, 204]))
    took = {"kernel beside a copy-out": 54, "kernel beside a copy-in": 58, "kernel beside no copy": 51}
    assert {name: (1, 50, microseconds) for name, microseconds in took.items()}.items() <= found.items()


def test_a_pause_may_be_the_host_s_or_another_stream_s() -> None:
    late = chain([100, 165, 217, 269], issued={1: 140.0})
    assert compared(late)[pauses.LATE] == (1, 2, 15)
    assert compared(chain([100, 152, 204, 256]), late)[pauses.LATE] == (1, 15, 2)
    assert compared(chain([100, 152, 904, 956]), chain([100, 152, 804, 856]))[pauses.STREAM] == (1, 602, 702)


def test_the_program_prints_a_table_draws_and_fails_beyond_the_limit(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    quiet = write_trace(tmp_path / "quiet.json.gz", kernel(0, 300), call("cudaStreamSynchronize", 100, 310))
    blocked = write_trace(
        tmp_path / "blocked.json", kernel(0, 300), copy_out(0, 2000), call("cudaStreamSynchronize", 100, 1000)
    )
    plot = tmp_path / "waits.png"
    more = ["--picture", str(plot), "--limit-ms", "0.5", "--markdown"]

    def run(*traces: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(BENCHMARK), "trace_waits", *traces, *more]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = run(f"none={quiet}", f"ours={blocked}")
    assert done.returncode == 1, done.stderr
    assert "| ours | cudaStreamSynchronize | 1 | 0.900 | 0.900 | 0.900 | 0.700 | 0.700 |" in " ".join(
        done.stdout.split()
    )
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert run(f"none={quiet}").returncode == 0


def test_a_trace_that_torch_wrote_is_read(tmp_path: Path) -> None:
    file = tmp_path / "trace.json.gz"
    with torch.profiler.profile() as profiler:
        torch.ones(8).sum().item()
    profiler.export_chrome_trace(str(file))
    found = trace.read_trace(file)
    assert found.end > 0 and found.waits == [], "without a GPU nothing waits for one"
