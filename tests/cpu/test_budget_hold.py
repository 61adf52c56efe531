# SPDX-License-Identifier: Apache-2.0
"""What is left unused while a decision holds, window by window, on a decider that writes down what it is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from offload_engine._budget.hold import HoldWatch
from offload_engine.planning.memory import Excess

BUDGET = 1 << 20
UNUSED = BUDGET // 32


def watch_of(
    peak_bytes: int, stalled_ms: float = 1.0, recomputed_bytes: int = 0
) -> tuple[HoldWatch, Any, list[Excess]]:
    corrected: list[Excess] = []
    best = SimpleNamespace(held_bytes=BUDGET, stalled_ms=stalled_ms, recomputed_bytes=recomputed_bytes)
    decider = mock.Mock(budget_bytes=BUDGET, extra_bytes=0, is_at_floor=False, chosen=SimpleNamespace(best=best))
    decider.agree, decider.correct = lambda numbers: numbers, corrected.append
    decider.level.return_value, decider.decide.return_value = False, None
    last = mock.Mock(peak_bytes=peak_bytes, end_bytes=0)
    return HoldWatch(decider, mock.Mock(), last), last, corrected


@pytest.mark.parametrize(("stalled_ms", "recomputed_bytes"), [(1.0, 0), (0.0, 1), (0.0, 0)])
@pytest.mark.parametrize("unused", [UNUSED, UNUSED + 1])
def test_half_of_what_a_window_left_is_used_where_that_may_save_time(
    unused: int, stalled_ms: float, recomputed_bytes: int
) -> None:
    watch, _, corrected = watch_of(BUDGET - unused, stalled_ms, recomputed_bytes)
    watch.use_what_is_left()
    is_used = unused > UNUSED and (stalled_ms > 0 or recomputed_bytes > 0)
    assert corrected == [Excess(-unused // 2)] * is_used


@pytest.mark.parametrize(("num_excesses", "num_windows"), [(0, 1), (1, 2), (3, 8), (6, 64), (7, 64)])
def test_steps_above_the_budget_double_how_long_it_takes(num_excesses: int, num_windows: int) -> None:
    watch, last, corrected = watch_of(BUDGET + 1)
    for _ in range(num_excesses):
        watch.answer(BUDGET + 1, is_window_over=False)
    last.peak_bytes = BUDGET
    watch.use_what_is_left()  # nothing was left
    last.peak_bytes = BUDGET // 2
    for _ in range(2):
        corrected.clear()
        for _ in range(num_windows):
            assert not corrected
            watch.use_what_is_left()
        assert len(corrected) == 1


def test_a_plan_that_was_given_and_does_not_fit_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Where ranks have to agree it is measured when a window is over; every step until then was warned of."""
    watch, _, _ = watch_of(BUDGET + 1)
    watch._decider.chosen, watch._in_force.recomputed = None, frozenset()
    for _ in range(3):
        watch.answer(BUDGET + 1, is_window_over=False)
    assert watch.wants_measure and len(caplog.records) == 1
