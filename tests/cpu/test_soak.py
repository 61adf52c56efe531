# SPDX-License-Identifier: Apache-2.0
"""Nothing grows from step to step; tools/soak.py runs thousands of them."""

from __future__ import annotations

import pytest

from tests.interrupts.jobs import DEVICES, JOBS
from tests.tool_scripts import load_tool

for package in ("psutil", "rich", "tqdm"):
    pytest.importorskip(package)
soak = load_tool("soak")


@pytest.mark.parametrize("name", JOBS)
def test_nothing_grows(name: str) -> None:
    before, after = soak.soak(JOBS[name](DEVICES["cpu"]()), 60, name)
    assert not soak.growth(before, after), (before, after)
    assert after.slab_kib > 0, "nothing moves"
