# SPDX-License-Identifier: Apache-2.0
"""Budgets in the benchmarks on a GPU: what their first plan is judged by, and that all ranks take as many steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.records import first_prediction


def test_the_first_plan_is_judged_by_its_last_step() -> None:
    held = [5, 7, 4, 9, 8]
    steps = [{"held_bytes": n, "predicted_bytes": p} for n, p in zip(held, [None, 6, 6, 9, 9], strict=True)]
    assert first_prediction(steps) == {"first_predicted_bytes": 6, "first_held_bytes": 4}
    assert first_prediction(steps[:1]) == {"first_predicted_bytes": None, "first_held_bytes": None}


def test_the_warm_up_lasts_until_every_rank_has_decided() -> None:
    measure = pytest.importorskip("benchmarks.gpu.measure")
    others = iter([False, False, True])
    ranks = SimpleNamespace(barrier=lambda: None, gather=lambda is_ready: [is_ready, next(others)])
    steps: list[str] = []
    training: Any = SimpleNamespace(step=lambda: [], gradients=dict)
    bench = measure.Bench(training, ranks, None, warmup=1, iters=1, on_step=steps.append)
    bench._warm_up(SimpleNamespace(entry=SimpleNamespace(label="budget"), is_ready=lambda: True))
    assert len(steps) == 3
