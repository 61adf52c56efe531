# SPDX-License-Identifier: Apache-2.0
"""Interrupts at random times and places: with RANDOM_INTERRUPTS=5000, as at night, thousands, also by real timers.

A trial that hangs ends its process: pytest-xdist goes on with the next test in another one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from offload_engine import IS_COMPILED
from tests.interrupts.trials import EXPECTED, PLACES, REPEATABLE, Trials

IN_CI = 60
NUM_TRIALS = int(os.environ.get("RANDOM_INTERRUPTS", IN_CI))
OF_A_TEST = 100
STRIDE = 1 if NUM_TRIALS > IN_CI else 5  # of byte codes

pytestmark = pytest.mark.usefixtures("interrupts_raise", "no_logs")


@pytest.fixture
def no_logs() -> Iterator[None]:
    """Write nothing of what the engine says of each abandoned step: an interrupt may come in the midst of it."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.skipif(IS_COMPILED, reason="compiled code has no byte codes, and Python delivers no signal inside it")
@pytest.mark.parametrize("first", range(0, NUM_TRIALS, OF_A_TEST))
def test_after_an_interrupt_nothing_is_left_and_the_next_step_is_equal(first: int, one_thread: None) -> None:
    trials = Trials(PLACES if NUM_TRIALS > IN_CI else REPEATABLE)
    seeds = range(first, min(first + OF_A_TEST, NUM_TRIALS))
    failed = [trial for trial in map(trials.run, seeds) if trial.outcome not in EXPECTED]
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
