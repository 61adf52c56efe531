# SPDX-License-Identifier: Apache-2.0
"""Runs the processes of the benchmark in turns, and shows what they found."""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Sequence

from benchmarks.apart import Apart
from benchmarks.flags import set_defaults
from benchmarks.gpu.settings import ENVIRONMENT
from benchmarks.records import Records, provenance
from benchmarks.tables import MIB, Column, Record, show, table

from .settings import parse

SECONDS, HOST_BYTES = 240.0, 100 << 30  # of one process
_PACKAGES = ("torch", "megatron-core", "transformer-engine")
_IMPORTS = ("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.extensions.transformer_engine")
_COLUMNS: dict[str, Column] = {
    "contender": "contender",
    "failure": "failure",
    "step ms": lambda record: _in_words(record.get("step_ms")),
    "host ms": lambda record: _in_words(record.get("host_ms")),
    "reserved MiB": ("reserved_bytes", "MiB"),
    "allocated MiB": ("allocated_bytes", "MiB"),
    "on host MiB": ("moved_bytes", "MiB"),
    "around a replay us": lambda record: _in_words(record.get("around_replays_us")),
    "loss": ("loss", ".6f"),
}
_SUMMARY: dict[str, Column] = {
    "contender": "contender",
    "step ms": ("step_ms", ".1f"),
    "over none": ("over_none", ".4f"),
    "reserved MiB": ("reserved_mib", ",.0f"),
    "allocated MiB": ("allocated_mib", ",.0f"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    settings = parse(arguments)
    import torch
    from tqdm import tqdm

    if not torch.cuda.is_available():
        print("this benchmark needs a GPU", file=sys.stderr)
        return 2
    from .training import measure

    set_defaults(ENVIRONMENT)
    records = Records(settings.json)
    jobs = settings.jobs * settings.rounds
    job, device = settings.jobs[0], torch.cuda.get_device_name()
    fields = {name: value for name, value in job._asdict().items() if name not in ("contender", "shape")}
    records.write([{"kind": "run", **provenance(_PACKAGES), "device": device, "shape": vars(job.shape), **fields}])
    with contextlib.ExitStack() as stack:
        # All import at once, which takes longer than a turn; the turns come one after the other.
        processes = [stack.enter_context(Apart(measure, job, imports=_IMPORTS)) for job in jobs]
        for process in processes:
            process.await_start()
        for turn, process in zip(tqdm(jobs, desc="recipes", unit="process"), processes, strict=True):
            with process:
                ended = process.run(seconds=SECONDS, host_bytes=HOST_BYTES)
            about = {"kind": "turn", "contender": turn.contender.label, "failure": ended.failure}
            records.write([{**about, **(ended.value or {})}])
    turns = records.of("turn")
    records.write(summarize(turns))
    sizes = f"{job.shape.layers} layers, {job.shape.seq} tokens, {job.shape.nmb} microbatches"
    recomputed = f", recomputing {' '.join(job.recomputed)}" if job.recomputed else ""
    title = f"{device}, {sizes}, offload of {' '.join(job.modules)}{recomputed}"
    show(table(title, _COLUMNS, turns), table(f"{title}, all turns", _SUMMARY, records.of("summary")))
    return int(any(record["failure"] for record in turns))


def summarize(turns: Sequence[Record]) -> list[Record]:
    """Make one record for each contender that has not failed: the median of all its steps, and its largest peaks."""
    own: dict[str, list[Record]] = {}
    for turn in turns:
        if turn["failure"] is None:
            own.setdefault(turn["contender"], []).append(turn)
    medians = {name: statistics.median(ms for turn in some for ms in turn["step_ms"]) for name, some in own.items()}
    found = []
    for name, some in own.items():
        ratio = {"over_none": round(medians[name] / medians["none"], 4)} if "none" in medians else {}
        peaks = {f"{what}_mib": max(turn[f"{what}_bytes"] for turn in some) for what in ("reserved", "allocated")}
        sizes = {what: round(nbytes / MIB) for what, nbytes in peaks.items()}
        found.append({"kind": "summary", "contender": name, "step_ms": round(medians[name], 1), **ratio, **sizes})
    return found


def _in_words(values: Sequence[float] | None) -> str:
    return f"{statistics.median(values):.1f}, mean {statistics.mean(values):.1f}" if values else ""
