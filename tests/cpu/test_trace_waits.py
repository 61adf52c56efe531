# SPDX-License-Identifier: Apache-2.0
"""benchmarks/run.py trace_waits, on small traces of known content."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


def write_trace(file: Path, *events: dict[str, Any]) -> Path:
    content = json.dumps({"traceEvents": [FIRST, {"ph": "M", "name": "process_name"}, *events]})
    file.write_bytes(gzip.compress(content.encode()) if file.suffix == ".gz" else content.encode())
    return file


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
