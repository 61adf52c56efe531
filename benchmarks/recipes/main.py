# SPDX-License-Identifier: Apache-2.0
"""Runs the processes of the benchmark in turns, and shows what they found."""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.apart import Apart
from benchmarks.records import Records, provenance
from benchmarks.tables import Column, show, table

from .settings import Job, parse

SECONDS, HOST_BYTES = 240.0, 100 << 30  # of one process
_PACKAGES = ("torch", "megatron-core", "transformer-engine")
_IMPORTS = ("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.extensions.transformer_engine")
_COLUMNS: dict[str, Column] = {
    "contender": "contender",
    "failure": "failure",
    "step ms": lambda record: f"{_median(record, 'step_ms'):.1f}",
    "host ms": lambda record: f"{_median(record, 'host_ms'):.1f}",
    "reserved MiB": ("reserved_bytes", "MiB"),
    "allocated MiB": ("allocated_bytes", "MiB"),
    "on host MiB": ("moved_bytes", "MiB"),
    "around a replay us": ("around_replay_us", ".1f"),
    "loss": ("loss", ".6f"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    settings = parse(arguments)
    import torch
    from tqdm import tqdm

    if not torch.cuda.is_available():
        print("this benchmark needs a GPU", file=sys.stderr)
        return 2
    from .training import measure

    records = Records(settings.json)
    jobs = settings.jobs * settings.rounds
    records.write([_description(settings.jobs[0])])
    with contextlib.ExitStack() as stack:
        # All import at once, which takes longer than a turn; the turns come one after the other.
        processes = [stack.enter_context(Apart(measure, job, imports=_IMPORTS)) for job in jobs]
        for process in processes:
            process.await_start()
        for job, process in zip(tqdm(jobs, desc="recipes", unit="process"), processes, strict=True):
            ended = process.run(seconds=SECONDS, host_bytes=HOST_BYTES)
            about = {"kind": "turn", "contender": job.contender.label, "failure": ended.failure}
            records.write([{**about, **(ended.value or {})}])
            process.end()
    turns = records.of("turn")
    show(table(_title(settings.jobs[0]), _COLUMNS, turns))
    return int(any(record["failure"] for record in turns))


def _description(job: Job) -> dict[str, Any]:
    import torch

    fields = {name: value for name, value in job._asdict().items() if name not in ("contender", "shape")}
    device = torch.cuda.get_device_name()
    return {"kind": "run", **provenance(_PACKAGES), "device": device, "shape": vars(job.shape), **fields}


def _title(job: Job) -> str:
    import torch

    sizes = f"{job.shape.layers} layers, {job.shape.seq} tokens, {job.shape.nmb} microbatches"
    recomputed = f", recomputing {' '.join(job.recomputed)}" if job.recomputed else ""
    return f"{torch.cuda.get_device_name()}, {sizes}, offload of {' '.join(job.modules)}{recomputed}"


def _median(record: dict[str, Any], field: str) -> float:
    return statistics.median(record.get(field, [0.0]))
