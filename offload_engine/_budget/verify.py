# SPDX-License-Identifier: Apache-2.0
"""`Verifier`: judges decisions by the memory of their steps."""

from __future__ import annotations

import logging
from typing import Final

from offload_engine._budget.decide import Decider, correct_chosen
from offload_engine.planning.choices import Allowance
from offload_engine.planning.choose import below_floor_text
from offload_engine.planning.memory import Excess
from offload_engine.schedule import Action

logger = logging.getLogger(__name__)

_MAX_CORRECTIONS: Final = 3
_MAX_STEPS: Final = 4
"""After which a decision is judged, even if what its steps hold still grows."""
_SURPRISE: Final = 1 / 128
"""Share of a budget."""


class Verifier:
    """Corrects the decisions of a decider until one is within the budget, at most three times.

    A decision is judged by its second step: an empty allocator fills its segments differently from one that has run the
    same step before, by up to 1 GiB. The first step only shows whether the decision is over the budget. If a step holds
    more than the one before it and the next could not grow as much, that one judges. Steps with other microbatches have
    a decision of their own, and a first step of their own. Behind a step that no plan knew the allocator is emptied: if
    the next one then holds much less than predicted, the one after it judges.

    The measurement of one step applies to another one with a margin: the observed variation of saved bytes.

    Args:
        decider: decides.
    """

    def __init__(self, decider: Decider) -> None:
        self._decider = decider
        self._num_corrections = 0
        self._may_reconsider = False
        self._totals: dict[tuple[Action, ...], list[int]] = {}  # excesses of steps with the decisions in force
        self._unplanned: set[tuple[Action, ...]] = set()  # where the first of them is of a step that no plan knew

    def begin(self) -> None:
        """Start verifying a first decision."""
        self._num_corrections = 0
        self._may_reconsider = True
        self._forget_steps()

    def reconsider(self) -> Allowance | None:
        """Return what to allow instead, if corrected times show it to be faster; at most once after each `begin`."""
        may_reconsider, self._may_reconsider = self._may_reconsider, False
        allowance = self._decider.reconsider() if may_reconsider else None
        if allowance is not None:
            self._num_corrections = 0
            self._forget_steps()
        return allowance

    def settles(self, actions: tuple[Action, ...], excess: Excess, *, is_planned: bool = True) -> bool:
        """Note that a step of these actions has run; return whether it judges.

        Args:
            actions: of the step.
            excess: of the step; agreed by all ranks that decide alike.
            is_planned: its plan knew all groups.
        """
        totals = self._totals.setdefault(actions, [])
        totals.append(excess.total)
        if not is_planned:
            self._unplanned.add(actions)
        if len(totals) < 2:
            return False
        is_first = len(totals) == 2 and actions in self._unplanned  # with a plan, and with an empty allocator
        if is_first and excess.total < -_SURPRISE * self._decider.budget_bytes:
            return False
        grown = 0 if is_first else max(0, totals[-1] - totals[-2])
        has_room = self.fits(Excess(excess.total + grown))
        return has_room or not self.fits(excess) or not self._may_correct or len(totals) >= _MAX_STEPS

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
        if is_over and self._may_correct:
            self._begin_again()
            correct_chosen(decider, excess)
            return decider.decide()
        if is_over and self._num_corrections < _MAX_CORRECTIONS and self._corrects_floor(excess):
            self._begin_again()
            return decider.decide()
        decider.take_in(excess)
        assert decider.chosen is not None and decider.known is not None
        best = decider.chosen.best
        if decider.is_at_floor and best.held_bytes > decider.budget_bytes:
            logger.warning("%s", below_floor_text(decider.budget_bytes, best, decider.known.model))
        return None

    def _corrects_floor(self, excess: Excess) -> bool:
        """Correct what a floor that recomputes reserves in vain; return whether it was one.

        What a step takes with everything offloaded was measured, so that stays as it is.
        """
        decider, chosen, known = self._decider, self._decider.chosen, self._decider.known
        if known is None or chosen is None or not (decider.is_at_floor and chosen.best.recomputed_bytes):
            return False
        if excess.wasted <= 0:
            return False
        known.note_wasted(chosen.best, decider.actions, excess.wasted)
        decider.correct(Excess(max(0, excess.allocated)))
        return True

    def _begin_again(self) -> None:
        self._num_corrections += 1
        self._forget_steps()

    def _forget_steps(self) -> None:
        self._totals.clear()
        self._unplanned.clear()

    @property
    def _may_correct(self) -> bool:
        return not self._decider.is_at_floor and self._num_corrections < _MAX_CORRECTIONS
