# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/run.py cpu` still knows the engine: its cheapest part runs. What it says of the time is not looked at."""

from __future__ import annotations

import pytest

pytest.importorskip("tqdm")

from benchmarks import cpu


def test_cost_is_measured() -> None:
    calls, through_autograd = cpu.bench_cost(repeats=1, num_groups=4)
    assert "handler calls of a group" in calls.what and float(calls.value) > 0 and through_autograd.unit == "us"
