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


def judged(*events: dict[str, Any]) -> list[caused.Judged]:
    return caused.judge(trace.make_trace([FIRST, *events]), MIB)


# ---- spans ----


def brute_force(spans: list[Span]) -> set[int]:
    return {point for span in spans for point in range(int(span.begin), int(span.end))}


def test_spans_are_sets_of_time() -> None:
    random.seed(1)
    for _ in range(200):
        one, other = (
            [Span(begin, begin + random.randrange(1, 9)) for begin in random.choices(range(60), k=5)] for _ in range(2)
        )
        bound = Span(20, 45)
        assert brute_force(union(one)) == brute_force(one)
        assert total(union(one)) == len(brute_force(one))
        assert brute_force(within(union(one), bound)) == brute_force(one) & brute_force([bound])
        assert brute_force(without(union(one), union(other))) == brute_force(one) - brute_force(other)


# ---- what counts as a wait ----


def test_a_wait_has_the_name_of_the_operation_that_made_it() -> None:
    found = trace.make_trace(
        [
            FIRST,
            event("cpu_op", "aten::item", 10, 60),
            event("cpu_op", "aten::_local_scalar_dense", 12, 58),
            call("cudaStreamSynchronize", 20, 55),
            call("cudaStreamSynchronize", 70, 75),
            call("cudaLaunchKernel", 80, 90),
        ]
    )
    assert [(wait.what, wait.span) for wait in found.waits] == [
        ("aten::item, cudaStreamSynchronize", Span(20, 55)),
        ("cudaStreamSynchronize", Span(70, 75)),
    ]


# ---- whose fault it is ----


def test_a_wait_for_computation_is_not_the_copy_s_fault() -> None:
    (one,) = judged(kernel(0, 1000), copy_out(0, 2000), call("cudaStreamSynchronize", 100, 1000))
    assert one.copying_us == 900 and one.caused_us == 0


def test_a_wait_in_which_the_gpu_only_copies_is_the_copy_s_fault() -> None:
    (one,) = judged(kernel(0, 300), copy_out(0, 2000), call("cudaStreamSynchronize", 100, 1000))
    assert one.caused_us == 700


def test_pauses_between_kernels_are_not_blamed_on_copies() -> None:
    kernels = [kernel(begin, begin + 40) for begin in range(0, 1000, 50)]
    (one,) = judged(*kernels, copy_out(0, 2000), call("cudaStreamSynchronize", 100, 990))
    assert one.copying_us == 890 and one.caused_us == 0


def test_a_small_read_behind_large_copies_is_the_copies_fault_even_while_the_gpu_computes() -> None:
    (issue, one) = judged(
        kernel(0, 5000),
        copy_out(0, 2000),
        copy_out(2005, 4000),  # queued directly behind the first
        copy_out(4004, 4006, nbytes=256, correlation=9),
        call("cudaMemcpyAsync", 90, 95, correlation=9),
        call("cudaEventSynchronize", 100, 4010),
    )
    assert issue.caused_us == 0 and one.caused_us == 4004 - 100


def test_a_read_by_a_kernel_waits_for_no_copy() -> None:
    spin = [call("cudaEventQuery", begin, begin + 2) for begin in range(100, 130, 5)]
    (one,) = judged(kernel(0, 128), kernel(128, 130), copy_out(0, 2000), *spin)
    assert one.wait.what == "spin of cudaEventQuery" and one.caused_us <= 2


def test_rows_have_counts_and_the_longest_of_each_kind() -> None:
    found = judged(
        kernel(0, 300),
        copy_out(0, 2000),
        call("cudaStreamSynchronize", 100, 1000),
        call("cudaStreamSynchronize", 2000, 2010),
        call("cudaEventSynchronize", 3000, 3100),
    )
    rows = caused.summarize("ours", found)
    assert [(row["what"], row["count"], row["longest_us"], row["longest_caused_us"]) for row in rows] == [
        ("cudaStreamSynchronize", 2, 900, 700),
        ("cudaEventSynchronize", 1, 100, 0),
        ("all", 3, 900, 700),
    ]


# ---- the picture and the program ----


def write_trace(file: Path, *events: dict[str, Any]) -> Path:
    content = json.dumps({"traceEvents": [FIRST, {"ph": "M", "name": "process_name"}, *events]})
    if file.suffix == ".gz":
        file.write_bytes(gzip.compress(content.encode()))
    else:
        file.write_text(content)
    return file


# ---- pauses between kernels ----


def chain(begins: list[float], *more: dict[str, Any], issued: dict[int, float] | None = None) -> trace.Trace:
    """Make kernels a, b, c... of 50 microseconds, launched at 1, 2, 3... or at what `issued` says."""
    kernels, calls = [], []
    for number, begin in enumerate(begins):
        kernels.append(kernel(begin, begin + 50, name=chr(ord("a") + number), correlation=number + 1))
        at = (issued or {}).get(number, 1.0 + number)
        calls.append(call("cudaLaunchKernel", at, at + 5, correlation=number + 1))
    return trace.make_trace([FIRST, *kernels, *calls, *more])


def compared(
    other: trace.Trace, reference: trace.Trace | None = None, kinds: tuple[str, ...] = pauses.KINDS
) -> dict[str, tuple[int, float, float]]:
    rows = pauses.compare(reference or chain([100, 152, 204, 256]), other, MIB)
    return {
        row["pause"]: (row["count"], pytest.approx(row["reference_us"]), pytest.approx(row["total_us"]))
        for row in rows
        if row["count"] and row["pause"] in kinds
    }


def test_pauses_are_told_apart_by_what_is_copied() -> None:
    copies = [copy_out(151, 156), {**copy_out(207, 210), "name": "Memcpy HtoD (Pinned -> Device)"}]
    assert compared(chain([100, 155, 209, 266], *copies)) == {
        pauses.OUT: (1, 2.0, 5.0),
        pauses.IN: (1, 2.0, 4.0),
        pauses.QUIET: (1, 2.0, 7.0),
    }


def test_kernels_are_compared_by_what_is_copied_beside_them() -> None:
    slow = [
        kernel(begin, begin + took, name=name) for begin, took, name in ((100, 51, "a"), (152, 54, "b"), (207, 58, "c"))
    ]
    copies = [copy_out(170, 190), {**copy_out(230, 240), "name": "Memcpy HtoD (Pinned -> Device)"}]
    other = trace.make_trace([FIRST, *slow, *copies])
    assert compared(other, chain([100, 152, 204]), pauses.KERNEL_KINDS) == {
        "kernel beside a copy-out": (1, 50.0, 54.0),
        "kernel beside a copy-in": (1, 50.0, 58.0),
        "kernel beside no copy": (1, 50.0, 51.0),
    }


def test_a_kernel_that_was_launched_late_in_either_trace_is_the_host_s() -> None:
    late = {1: 140.0}
    assert compared(chain([100, 165, 217, 269], issued=late))[pauses.LATE] == (1, 2.0, 15.0)
    assert compared(chain([100, 152, 204, 256]), chain([100, 165, 217, 269], issued=late))[pauses.LATE] == (
        1,
        15.0,
        2.0,
    )


def test_a_long_pause_of_work_that_is_there_waits_for_another_stream() -> None:
    assert compared(chain([100, 152, 904, 956]), chain([100, 152, 804, 856]))[pauses.STREAM] == (1, 602.0, 702.0)


def test_the_program_prints_a_table_draws_and_fails_beyond_the_limit(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    quiet = write_trace(tmp_path / "quiet.json.gz", kernel(0, 300), call("cudaStreamSynchronize", 100, 310))
    blocked = write_trace(
        tmp_path / "blocked.json", kernel(0, 300), copy_out(0, 2000), call("cudaStreamSynchronize", 100, 1000)
    )
    plot, rows = tmp_path / "waits.png", tmp_path / "rows.jsonl"
    more = ["--picture", str(plot), "--json", str(rows), "--limit-ms", "0.5", "--markdown"]

    def run(*traces: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(BENCHMARK), "trace_waits", *traces, *more]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = run(f"none={quiet}", f"ours={blocked}")
    assert done.returncode == 1, done.stderr
    assert "| ours | cudaStreamSynchronize | 1 | 0.900 | 0.900 | 0.900 | 0.700 | 0.700 |" in " ".join(
        done.stdout.split()
    )
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert [json.loads(line)["label"] for line in rows.read_text().splitlines()] == ["none", "none", "ours", "ours"]
    assert run(f"none={quiet}").returncode == 0


def test_a_trace_that_torch_wrote_is_read(tmp_path: Path) -> None:
    file = tmp_path / "trace.json.gz"
    with torch.profiler.profile() as profiler:
        torch.ones(8).sum().item()
    profiler.export_chrome_trace(str(file))
    found = trace.read_trace(file)
    assert found.end > 0 and found.waits == [], "without a GPU nothing waits for one"
