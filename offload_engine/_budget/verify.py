# SPDX-License-Identifier: Apache-2.0
"""`Verifier`: judges decisions by what a step has held with them."""

from __future__ import annotations

from typing import Final

from offload_engine._budget.decide import Decider
from offload_engine.planning.choices import Allowance
from offload_engine.planning.choose import Chosen
from offload_engine.planning.memory import Excess

_MAX_CORRECTIONS: Final = 3
_CLOSE: Final = 1 / 256
"""Of the budget: not worth another decision."""
_WORTH: Final = 1 / 128
"""Of the time of a step: less is not worth another decision, and the steps that verify it."""
_MEASURED: Final = 1 / 4
"""Of the first guard: what one decision was seen to reserve in vain says so much of the next. (Five budgets on an H200:
the second reserved at most a seventh of the guard more than the first.)"""


class Verifier:
    """Corrects the decisions of a decider, one step after the other, at most three times.

    The first decision leaves a guard, because what an allocator reserves in vain differs from decision to decision. A
    quarter of that is left where it was measured, and what else a step left unused is given to the next decision; if
    that goes over the budget, the one before is taken again, which is known to fit. After that nothing more is tried.
    What was measured of one step fits another one only with a margin, as far as what chunks save was seen to vary.

    Args:
        decider: decides.
    """

    def __init__(self, decider: Decider) -> None:
        self._decider = decider
        self._num_corrections = 0
        self._first_guard = 0
        self._may_try = True
        self._fitting: Chosen | None = None  # measured to be within the budget, before more was tried

    def begin(self) -> None:
        """Begin with a first decision."""
        self._num_corrections, self._fitting, self._may_try = 0, None, True
        self._first_guard = self._decider.guard_bytes

    def judge(self, excess: Excess) -> Allowance | None:
        """Take in what a step held beyond its prediction; return what to allow instead, None: the decision is good.

        Args:
            excess: agreed by all ranks that decide alike.
        """
        decider = self._decider
        if self._unused(excess) < 0 and decider.is_at_floor:
            return None  # nothing more can leave
        if self._num_corrections >= _MAX_CORRECTIONS:
            decider.take_in(excess)
            return None
        self._num_corrections += 1
        return self._with_more(excess) if self.fits(excess) else self._with_less(excess)

    def fits(self, excess: Excess) -> bool:
        """Return whether a step was within the budget, or no decision could make it so."""
        return self._unused(excess) >= 0 or self._decider.is_at_floor

    def _unused(self, excess: Excess) -> int:
        decider, chosen = self._decider, self._decider.chosen
        assert chosen is not None
        return decider.budget_bytes - decider.margin_bytes - chosen.best.held_bytes - excess.total

    def _with_less(self, excess: Excess) -> Allowance:
        self._may_try = False
        self._decider.correct(excess)
        if self._fitting is not None:
            fitting, self._fitting = self._fitting, None
            return self._decider.go_back(fitting)
        self._decider.guard_bytes = max(self._decider.guard_bytes // 2, self._close_bytes)
        return self._decider.decide()

    def _with_more(self, excess: Excess) -> Allowance | None:
        """Use what was left, where that may save time, and one more correction can take it back."""
        decider, unused = self._decider, self._unused(excess)
        decider.take_in(excess)
        assert decider.chosen is not None
        fitting, guard = decider.chosen, max(round(_MEASURED * self._first_guard), self._close_bytes)
        is_slower = fitting.best.stalled_ms > 0 or bool(fitting.best.recomputed_bytes)
        may_try = self._may_try and self._num_corrections < _MAX_CORRECTIONS
        if not (may_try and is_slower and unused > guard + self._close_bytes):
            return None
        decider.guard_bytes = guard
        decider.correct(excess if excess.total < 0 else Excess())
        allowance = decider.decide(decider.actions)
        assert decider.chosen is not None
        if decider.chosen.best.step_ms >= (1.0 - _WORTH) * fitting.best.step_ms:
            decider.go_back(fitting)
            return None
        self._fitting = fitting
        return allowance

    @property
    def _close_bytes(self) -> int:
        return round(_CLOSE * self._decider.budget_bytes)
