# SPDX-License-Identifier: Apache-2.0
"""`Verifier`: judges decisions by the memory of their steps."""

from __future__ import annotations

import logging
from typing import Final

from offload_engine._budget.decide import Decider
from offload_engine.planning.choices import Allowance
from offload_engine.planning.choose import below_floor_text
from offload_engine.planning.memory import Excess
from offload_engine.schedule import Action

logger = logging.getLogger(__name__)

_MAX_CORRECTIONS: Final = 3


class Verifier:
    """Corrects the decisions of a decider until one is within the budget, at most three times.

    A decision is judged by its second step: an empty allocator fills its segments differently from one that has run the
    same step before, by up to 1 GiB. The first step only shows whether the decision is over the budget. Steps with
    other microbatches have a decision of their own, and a first step of their own.

    The measurement of one step applies to another one with a margin: the observed variation of saved bytes.

    Args:
        decider: decides.
    """

    def __init__(self, decider: Decider) -> None:
        self._decider = decider
        self._num_corrections = 0
        self._has_run: set[tuple[Action, ...]] = set()  # with the decisions that are in force

    def begin(self) -> None:
        """Start verifying a first decision."""
        self._num_corrections = 0
        self._has_run.clear()

    def settles(self, actions: tuple[Action, ...]) -> bool:
        """Note that a step of these actions has run; return whether one had before, so that this one judges."""
        had_run = actions in self._has_run
        self._has_run.add(actions)
        return had_run

    def fits(self, excess: Excess) -> bool:
        """Return whether a step was within the budget, with the margin by which steps vary."""
        decider, chosen = self._decider, self._decider.chosen
        assert chosen is not None
        return chosen.best.held_bytes + excess.total <= decider.budget_bytes - decider.margin_bytes

    def judge(self, excess: Excess) -> Allowance | None:
        """Judge the decision by a step's excess over its prediction.

        Args:
            excess: agreed by all ranks that decide alike.

        Returns:
            What to allow instead; None: the decision stays.
        """
        decider = self._decider
        is_over = not self.fits(excess)
        if is_over and not decider.is_at_floor and self._num_corrections < _MAX_CORRECTIONS:
            self._num_corrections += 1
            self._has_run.clear()
            decider.correct(excess)
            return decider.decide()
        decider.take_in(excess)
        assert decider.chosen is not None
        best = decider.chosen.best
        if decider.is_at_floor and best.held_bytes > decider.budget_bytes:
            logger.warning("%s", below_floor_text(decider.budget_bytes, best))
        return None
