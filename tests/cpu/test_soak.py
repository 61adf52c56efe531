# SPDX-License-Identifier: Apache-2.0
"""Nothing grows from step to step; tools/soak.py runs thousands of them."""

from __future__ import annotations

import pytest

from tests.interrupts.jobs import DEVICES, JOBS, Job
from tests.tool_scripts import load_tool

pytest.importorskip("psutil")
pytest.importorskip("rich")
pytest.importorskip("tqdm")
soak = load_tool("soak")

NUM_STEPS = 60


@pytest.mark.parametrize("name", JOBS)
def test_nothing_grows(name: str) -> None:
    before, after = soak.soak(JOBS[name](DEVICES["cpu"]()), NUM_STEPS, name)
    assert not soak.growth(before, after), (before, after)
    assert after.slab_kib > 0, "nothing moves"


def test_what_grows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []

    def step_and_keep(job: Job, number: int) -> None:
        kept.append([{"graph": job.train()} for _ in range(10)])

    monkeypatch.setattr(soak, "_step", step_and_keep)
    before, after = soak.soak(JOBS["manage_activations"](DEVICES["cpu"]()), NUM_STEPS, "keeps")
    assert "objects" in soak.growth(before, after)


def test_the_mean_of_each_quarter_counts() -> None:
    sample = soak.Sample(100, 5, 3, 64, 1000)
    assert soak.growth(sample, sample._replace(resident_mib=110, threads=4)) == ["resident_mib", "threads"]
    assert soak.growth(sample, sample._replace(resident_mib=107, objects=1100)) == []
