# SPDX-License-Identifier: Apache-2.0
"""`TakenPlan`: holds a decision that was made before, until it is known to be for this model."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import NamedTuple

from offload_engine._budget.agreement import Agree, are_alike
from offload_engine.planning.choices import Slot
from offload_engine.planning.saved_plan import SavedPlan, check_same_model

logger = logging.getLogger(__name__)


class TakenPlan(NamedTuple):
    """A decision to begin with, and where it comes from."""

    saved: SavedPlan
    source: str

    def check(self, slots: Collection[Slot], meet: Agree) -> None:
        """Check that it is for a model with these groups, on every rank.

        Raises:
            ValueError: if not; names where it comes from. On the other ranks, too.
        """
        try:
            check_same_model(self.saved, slots, self.source)
        except ValueError:
            meet((1,))
            raise
        [has_failed] = meet((0,))
        if has_failed:
            raise ValueError(f"{self.source} is not used: another rank rejects its plan; see its error")


def _can_all_take(saved: SavedPlan | None, agree: Agree, meet: Agree) -> bool:
    """Return whether every rank has a plan, and those that decide alike have the same choices."""
    chosen = saved and [(slot, saved.allowance.choices.of(slot)) for slot in sorted(saved.allowance.slots)]
    is_unlike = not are_alike(agree, str(chosen))
    [cannot] = meet((int(saved is None or is_unlike),))
    return not cannot


def take(saved: SavedPlan | None, source: str, budget_bytes: int, agree: Agree, meet: Agree) -> TakenPlan | None:
    """Return a plan to begin with; None if it takes more than the budget, or a rank has another plan or none."""
    if saved is not None and saved.held_bytes > budget_bytes:
        logger.warning("%s takes more than gpu_budget (%s bytes): not used", source, f"{saved.held_bytes:,}")
        saved = None
    can_take = _can_all_take(saved, agree, meet)
    if saved is None:
        return None
    if can_take:
        return TakenPlan(saved, source)
    logger.warning("%s is not used: other ranks have another plan, or none", source)
    return None
