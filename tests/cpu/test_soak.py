# SPDX-License-Identifier: Apache-2.0
"""Many training steps of each front-end, after which nothing has grown: with SOAK_STEPS=2000, as at night, thousands.

The model's batch changes from step to step, an evaluation and a dropped graph come in between. Resident memory, open
files, threads, host slabs and Python objects are counted about two dozen times; those of the last quarter must not
be above those of the second one.
"""

from __future__ import annotations

import gc
import os
import threading
from statistics import fmean
from typing import NamedTuple

import pytest
import torch

from tests.interrupts.jobs import DEVICES, JOBS, WIDTH, Job

psutil = pytest.importorskip("psutil")

NUM_STEPS = int(os.environ.get("SOAK_STEPS", "60"))
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


@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", JOBS)
def test_nothing_grows(name: str, one_thread: None) -> None:
    job, samples = JOBS[name](DEVICES["cpu"]()), list[Sample]()
    every = max(1, NUM_STEPS // NUM_SAMPLES)
    for number in range(NUM_STEPS):
        take_step(job, number)
        if number % every == every - 1:
            samples.append(take_sample(job))
    job.close()
    quarter = len(samples) // 4
    parts = samples[quarter : 2 * quarter], samples[-quarter:]
    before, after = (Sample(*map(fmean, zip(*part, strict=True))) for part in parts)
    grown = zip(Sample._fields, before, after, TOLERANCE, strict=True)
    assert not [name for name, old, new, tolerance in grown if new > old + tolerance], (before, after)
    assert after.slab_kib > 0, "nothing moves"


def take_step(job: Job, number: int) -> None:
    job.x = torch.randn(4 + number % 7, WIDTH)
    job.step()
    if number % 10 == 3:
        with torch.no_grad():
            job.model(job.x)
    if number % 10 == 7 and job.model.checkpoint is None:  # one that is not inside its `with` would be refused
        job.model(job.x)  # no backward: the graph is dropped


def take_sample(job: Job) -> Sample:
    gc.collect()
    assert job.engine is not None
    process = psutil.Process()
    slab_kib = job.engine.pool.slab_bytes_total / 1024
    resident_mib = process.memory_info().rss / 2**20
    return Sample(resident_mib, process.num_fds(), threading.active_count(), slab_kib, len(gc.get_objects()))
