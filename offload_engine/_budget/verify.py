# SPDX-License-Identifier: Apache-2.0
"""`Verifier`: judges decisions by what a step has held with them."""

from __future__ import annotations

from typing import Final

from offload_engine._budget.decide import Decider
from offload_engine.planning.choices import Allowance
from offload_engine.planning.choose import Chosen

_MAX_CORRECTIONS: Final = 3
_CLOSE: Final = 1 / 256
"""Of the budget: not worth another decision."""


class Verifier:
    """Corrects the decisions of a decider, one step after the other, at most three times.

    The first decision leaves a guard, because what an allocator reserves in vain differs from decision to decision.
    What a step left unused beyond half of that is given to the second one; if that goes over the budget, the first is
    taken again, which is known to fit. So a third step with a decision is above its budget only if the first was, too.

    Args:
        decider: decides.
    """

    def __init__(self, decider: Decider) -> None:
        self._decider = decider
        self._num_corrections = 0
        self._fitting: Chosen | None = None  # measured to be within the budget, before more was tried

    def begin(self) -> None:
        """Begin with a first decision."""
        self._num_corrections, self._fitting = 0, None

    def judge(self, error: int) -> Allowance | None:
        """Take in what a step held beyond its prediction; return what to allow instead, None: the decision is good.

        Args:
            error: in bytes, negative if it held less; agreed by all ranks that decide alike.
        """
        decider, chosen = self._decider, self._decider.chosen
        assert chosen is not None
        unused = decider.budget_bytes - chosen.best.held_bytes - error
        if unused < 0 and decider.is_at_floor:
            return None  # nothing more can leave
        if self._num_corrections >= _MAX_CORRECTIONS:
            decider.take_in(error)
            return None
        self._num_corrections += 1
        return self._with_less(error) if unused < 0 else self._with_more(error, unused)

    def _with_less(self, error: int) -> Allowance:
        self._decider.correct(error)
        if self._fitting is not None:
            fitting, self._fitting = self._fitting, None
            return self._decider.go_back(fitting)
        self._decider.guard_bytes = max(self._decider.guard_bytes // 2, self._close_bytes)
        return self._decider.decide()

    def _with_more(self, error: int, unused: int) -> Allowance | None:
        """Use what was left, once, where that may save time."""
        decider = self._decider
        is_first = self._num_corrections == 1
        decider.take_in(error)
        assert decider.chosen is not None
        fitting, guard = decider.chosen, max(decider.guard_bytes // 2, self._close_bytes)
        is_slower = fitting.best.stalled_ms > 0 or bool(fitting.best.recomputed_bytes)
        if not (is_first and is_slower and unused > guard + self._close_bytes):
            return None
        decider.guard_bytes = guard
        decider.correct(min(0, error))
        allowance = decider.decide(decider.actions)
        assert decider.chosen is not None
        if decider.chosen.best.step_ms >= fitting.best.step_ms:
            decider.go_back(fitting)
            return None
        self._fitting = fitting
        return allowance

    @property
    def _close_bytes(self) -> int:
        return round(_CLOSE * self._decider.budget_bytes)
