#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs thousands of training steps of each front-end, and checks that nothing grows.

python tools/soak.py [--steps N] [--front-end NAME ...]

The model's batch changes from step to step, an evaluation and a dropped graph come in between. Resident memory, open
files, threads, host slabs and Python objects are counted about two dozen times; those of its last quarter must not
be above those of its second one. The exit status is 0 if nothing grows, else 1.
"""

from __future__ import annotations

import argparse
import gc
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import psutil
import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests are not installed

from tests.interrupts.jobs import DEVICES, JOBS, WIDTH, Job  # noqa: E402

NUM_SAMPLES = 24


class Sample(NamedTuple):
    """What a process holds."""

    resident_mib: float
    files: float
    threads: float
    slab_kib: float
    objects: float


TOLERANCE = Sample(resident_mib=8, files=0, threads=0, slab_kib=0, objects=200)
"""How far the mean of the last quarter may be above that of the second one."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, default=2000, help="steps of each front-end, at least 16 (default: %(default)s)"
    )
    names = f"which of {', '.join(JOBS)} (default: all)"
    parser.add_argument("--front-end", nargs="+", choices=list(JOBS), default=list(JOBS), metavar="NAME", help=names)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    table = Table("front-end", *(f"{name}: before, after" for name in Sample._fields), "grows")
    has_grown = False
    for name in options.front_end:
        before, after = soak(JOBS[name](DEVICES["cpu"]()), options.steps, name)
        grown = growth(before, after)
        has_grown |= bool(grown)
        pairs = (f"{old:.0f}, {new:.0f}" for old, new in zip(before, after, strict=True))
        table.add_row(name, *pairs, ", ".join(grown) or "-", style="bold red" if grown else None)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return int(has_grown)


def soak(job: Job, num_steps: int, name: str) -> tuple[Sample, Sample]:
    """Run steps of `job`; return the means of the samples in the second and in the last quarter of them."""
    every, samples = max(1, num_steps // NUM_SAMPLES), []
    for number in tqdm(range(num_steps), desc=name, unit="step"):
        _step(job, number)
        if number % every == every - 1:
            samples.append(_sample(job))
    job.close()
    quarter = len(samples) // 4
    parts = samples[quarter : 2 * quarter], samples[-quarter:]
    before, after = (Sample(*map(fmean, zip(*part, strict=True))) for part in parts)
    return before, after


def growth(before: Sample, after: Sample) -> list[str]:
    """Return the names of what has grown by more than `TOLERANCE`."""
    grown = zip(Sample._fields, before, after, TOLERANCE, strict=True)
    return [name for name, old, new, tolerance in grown if new > old + tolerance]


def _step(job: Job, number: int) -> None:
    job.x = torch.randn(4 + number % 7, WIDTH)
    job.step()
    if number % 10 == 3:
        with torch.no_grad():
            job.model(job.x)
    if number % 10 == 7 and job.model.checkpoint is None:  # one that is not inside its `with` would be refused
        job.model(job.x)  # no backward: the graph is dropped


def _sample(job: Job) -> Sample:
    gc.collect()
    assert job.engine is not None
    process = psutil.Process()
    slab_kib = job.engine.pool.slab_bytes_total / 1024
    resident_mib = process.memory_info().rss / 2**20
    return Sample(resident_mib, process.num_fds(), threading.active_count(), slab_kib, len(gc.get_objects()))


if __name__ == "__main__":
    sys.exit(main())
