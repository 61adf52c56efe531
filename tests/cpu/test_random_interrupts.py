# SPDX-License-Identifier: Apache-2.0
"""Interrupts at random times and places; `tools/interrupt_check.py` draws thousands of them."""

from __future__ import annotations

import os

import pytest

from offload_engine import IS_COMPILED
from tests.interrupts.trials import EXPECTED, REPEATABLE, Trials

NUM_TRIALS = int(os.environ.get("RANDOM_INTERRUPTS", "60"))

STRIDE = 1 if NUM_TRIALS > 60 else 5  # of byte codes

pytestmark = pytest.mark.usefixtures("interrupts_raise")


@pytest.mark.skipif(IS_COMPILED, reason="compiled code has no byte codes, and Python delivers no signal inside it")
def test_after_an_interrupt_nothing_is_left_and_the_next_step_is_equal() -> None:
    trials = Trials(REPEATABLE)
    failed = [trial for trial in map(trials.run, range(NUM_TRIALS)) if trial.outcome not in EXPECTED]
    assert not failed


@pytest.mark.skipif(IS_COMPILED, reason="compiled code has no byte codes, and Python delivers no signal inside it")
@pytest.mark.parametrize(("function", "num_byte_codes"), [("would_start_storage", 140), ("check", 300)])
def test_an_interrupt_at_each_byte_code_of_a_function(function: str, num_byte_codes: int) -> None:
    """Functions in which one was once enough to leave a lock held; every one of them each night."""
    trials, numbers = Trials(), range(1, num_byte_codes, STRIDE)
    assert sum(trials.interrupt("manage_activations", number, function) for number in numbers) == len(numbers)
