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
@pytest.mark.parametrize(
    ("front_end", "function", "num_byte_codes"),
    [
        ("manage_activations", "would_start_storage", 140),
        ("manage_activations", "check", 300),
        ("enable_activation_offloading", "end_forward", 40),
        ("offload_wrapper", "reset_peak", 36),
    ],
)
def test_an_interrupt_at_each_byte_code_of_a_function(front_end: str, function: str, num_byte_codes: int) -> None:
    """Functions in which one was once enough to leave a lock held, or offload switched off; each one nightly."""
    trials, numbers = Trials(), range(1, num_byte_codes, STRIDE)
    trials.interrupt(front_end, 1, function)  # Python 3.12 traces no byte codes for the first time in a process
    assert sum(trials.interrupt(front_end, number, function) for number in numbers) == len(numbers)
