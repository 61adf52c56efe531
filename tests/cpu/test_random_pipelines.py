# SPDX-License-Identifier: Apache-2.0
"""Random pipelines on the adversarial device: the same numbers with and without the engine, and nothing left behind."""

from __future__ import annotations

import os

import pytest
import torch

from offload_engine import IS_COMPILED
from tests.toy_pipeline import Case, Runner

pytestmark = pytest.mark.usefixtures("one_thread")
CASES_PER_BATCH = 25
NUM_BATCHES = int(os.environ.get("RANDOM_PIPELINE_BATCHES", "11"))  # fewer where many runs are compared
FIRST_BATCH = NUM_BATCHES if IS_COMPILED else 0  # where both cores are tested, each draws pipelines of its own


def check(case: Case) -> Runner:
    """Run `case` with and without the engine and compare everything.

    Raises:
        AssertionError: naming the seed; `check(Case.draw(seed))` runs it again.
    """
    expected = Runner(case, with_engine=False).run()
    runner = Runner(case, with_engine=True)
    try:
        actual = runner.run()
    except Exception as error:
        error.add_note(f"seed {case.seed}; hazards: {runner.hazards[:3]}")
        raise
    assert not runner.hazards, f"seed {case.seed}: {runner.hazards[:5]}"
    compare(case, expected, actual)
    assert runner.device is not None and runner.device.host_bytes == 0, f"seed {case.seed}: a slab is left"
    return runner


def compare(case: Case, expected: list[list[torch.Tensor] | None], actual: list[list[torch.Tensor] | None]) -> None:
    assert len(expected) == len(actual)
    for step, (want, got) in enumerate(zip(expected, actual, strict=True)):
        if got is None:  # failed, as it was told to; a copy only fails with the engine
            continue
        assert want is not None and len(want) == len(got), f"seed {case.seed} step {step}"
        for index, (a, b) in enumerate(zip(want, got, strict=True)):
            assert a.isfinite().all(), f"seed {case.seed} step {step}: the reference itself is not finite"
            assert torch.equal(a, b), f"seed {case.seed} step {step}: number {index} of {len(want)} differs"


@pytest.mark.parametrize("batch", range(FIRST_BATCH, FIRST_BATCH + NUM_BATCHES))
def test_random_pipelines(batch: int) -> None:
    moved = 0
    for seed in range(batch * CASES_PER_BATCH, (batch + 1) * CASES_PER_BATCH):
        moved += sum(stats.copied_out_bytes for stats in check(Case.draw(seed)).stats)
    assert moved > 10_000, "a batch in which nothing moves tests nothing"
