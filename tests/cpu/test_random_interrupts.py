"""Interrupts at random times and places; `tools/interrupt_check.py` draws thousands of them."""

from __future__ import annotations

import os

import pytest

from offload_engine import IS_COMPILED
from tests.interrupts.trials import EXPECTED, REPEATABLE, Trials

NUM_TRIALS = int(os.environ.get("RANDOM_INTERRUPTS", "60"))

pytestmark = pytest.mark.usefixtures("interrupts_raise")


@pytest.mark.skipif(IS_COMPILED, reason="compiled code has no byte codes, and Python delivers no signal inside it")
def test_after_an_interrupt_nothing_is_left_and_the_next_step_is_equal() -> None:
    trials = Trials(REPEATABLE)
    failed = [trial for trial in map(trials.run, range(NUM_TRIALS)) if trial.outcome not in EXPECTED]
    assert not failed
