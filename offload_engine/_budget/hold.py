# SPDX-License-Identifier: Apache-2.0
"""`HoldWatch`: watches steps while a decision holds."""

from __future__ import annotations

import logging
from typing import Final

from offload_engine._budget.decide import Decider, correct_chosen, excess_of
from offload_engine._budget.in_force import InForce
from offload_engine._budget.last_step import LastStep
from offload_engine.planning.choices import Allowance, Choices
from offload_engine.planning.memory import Excess
from offload_engine.sizes import short_size

logger = logging.getLogger(__name__)

_UNUSED: Final = 1 / 32
"""Share of the budget: if it was unused for a whole window, more is kept."""
_MAX_DOUBLED: Final = 6
"""At most this often, the number of windows to wait before more is kept doubles."""
_RELAPSE_STEPS: Final = 10
"""Steps after a trim: if one of them goes over the budget, the decision is why, and no evaluation between steps."""


class HoldWatch:
    """Keeps less at once if a step went over the budget, and more if steps were well below it for long.

    Args:
        decider: has the decision that holds.
        in_force: receives a new decision.
        last: what the last step took.

    Attributes:
        wants_measure: the decision that holds is no longer of use, so a step must be measured again.
    """

    def __init__(self, decider: Decider, in_force: InForce, last: LastStep) -> None:
        self.wants_measure: bool = False
        self._num_since_trim = _RELAPSE_STEPS  # steps within the budget
        self._num_excesses = 0
        self._num_unused = 0  # consecutive windows
        self._decider = decider
        self._in_force = in_force
        self._last = last

    def answer(self, held_bytes: int, is_window_over: bool) -> None:
        """Answer what the process has held, in the last step or after it."""
        gauge = self._last.gauge
        if held_bytes > self._decider.budget_bytes:
            return self._answer_excess(held_bytes)
        self._num_since_trim += 1
        if is_window_over or gauge.peak_bytes() > self._last.peak_bytes:
            gauge.reset()  # a new window; or the peak was between the steps

    def _answer_excess(self, held_bytes: int) -> None:
        decider, gauge = self._decider, self._last.gauge
        over = held_bytes - decider.budget_bytes
        is_allocated = self._last.peak_bytes + decider.extra_bytes > decider.budget_bytes
        is_relapse = self._num_since_trim < _RELAPSE_STEPS and self._last.end_bytes > decider.budget_bytes
        if is_allocated or is_relapse:
            if decider.is_at_floor or (decider.chosen is None and self.wants_measure):
                return  # the warning was logged, and nothing more can leave
            logger.warning("a step held %s more than its gpu_budget: less is kept from now on", short_size(over))
            self._keep_less(over, held_bytes)
        self._num_since_trim = 0
        self._in_force.clear_allocator()  # otherwise an evaluation or an optimizer has left more in it
        gauge.reset()

    def use_what_is_left(self) -> None:
        """Keep more if windows have left much of the budget unused; take over corrections of other ranks.

        One window is enough at first, but each step over the budget doubles the number of windows to wait. Otherwise
        bytes that vary would be kept and offloaded again for ever.
        """
        decider = self._decider
        if decider.level():
            self._in_force.allow(decider.decide())
        chosen = decider.chosen
        may_gain = chosen is not None and bool(chosen.best.num_moves or chosen.best.recomputed_bytes)
        own = self._last.peak_bytes + decider.extra_bytes, self._num_excesses, int(may_gain)
        need, num_excesses, can_gain = decider.agree(own)
        is_unused = decider.budget_bytes - need > _UNUSED * decider.budget_bytes
        self._num_unused = self._num_unused + 1 if is_unused else 0
        if chosen is None or self._num_unused < 1 << min(num_excesses, _MAX_DOUBLED):
            return
        if can_gain:
            self._num_unused = 0
            self._correct(Excess((need - chosen.best.held_bytes) // 2))
            if decider.chosen is None or decider.chosen.best.decision != chosen.best.decision:
                self._in_force.clear_allocator()

    def _keep_less(self, over: int, held_bytes: int) -> None:
        self._num_excesses += 1
        chosen = self._decider.chosen
        if chosen is None:
            self.wants_measure = True  # the plan that was given does not fit
            self._in_force.allow(
                Allowance(Choices(recomputed=self._in_force.recomputed))
            )  # other ranks go on with that
        else:
            excess = excess_of(self._decider, held_bytes, self._last.peak_bytes)
            short = max(0, over - excess.total)  # where more than the budget was predicted
            self._correct(Excess(max(0, excess.allocated) + short, excess.wasted), is_alone=True)

    def _correct(self, excess: Excess, is_alone: bool = False) -> None:
        if self._decider.is_alone:
            correct_chosen(self._decider, excess)
        else:  # what one rank notes of a decision, the others would not know
            self._decider.correct(excess)
        self._in_force.allow(self._decider.decide(is_alone=is_alone))
