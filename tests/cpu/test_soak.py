# SPDX-License-Identifier: Apache-2.0
"""Nothing grows from step to step; tools/soak.py runs thousands of them."""

from __future__ import annotations

import pytest

from tests.interrupts.jobs import DEVICES, JOBS, Job
from tests.tool_scripts import load_tool

for package in ("psutil", "rich", "tqdm"):
    pytest.importorskip(package)
soak = load_tool("soak")


@pytest.mark.parametrize("name", JOBS)
def test_nothing_grows(name: str) -> None:
    before, after = soak.soak(JOBS[name](DEVICES["cpu"]()), 60, name)
    assert not soak.growth(before, after), (before, after)
    assert after.slab_kib > 0, "nothing moves"


def test_what_grows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []

    def step_and_keep(job: Job, number: int) -> None:
        kept.append([{"graph": job.train()} for _ in range(10)])

    monkeypatch.setattr(soak, "_step", step_and_keep)
    before, after = soak.soak(JOBS["manage_activations"](DEVICES["cpu"]()), 60, "keeps")
    assert "objects" in soak.growth(before, after)
