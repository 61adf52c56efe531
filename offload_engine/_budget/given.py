"""`GivenPlan`: a decision that was made before, for a job to begin with."""

from __future__ import annotations

import logging
from collections.abc import Collection

from offload_engine._budget.agreement import Agree, are_alike
from offload_engine.planning.choices import Slot
from offload_engine.planning.saved_plan import SavedPlan, check_same_model

logger = logging.getLogger(__name__)


class GivenPlan:
    """Owns the plan until groups are known, by which it can be checked.

    Args:
        saved: the plan.
        source: where it comes from.

    Attributes:
        saved: the plan.
        is_checked: it is for this model.
    """

    def __init__(self, saved: SavedPlan, source: str) -> None:
        self.saved: SavedPlan = saved
        self.is_checked: bool = False
        self._source = source

    def check(self, slots: Collection[Slot], meet: Agree) -> None:
        """Check, once, that it is for a model with these groups.

        Raises:
            ValueError: if not; names where it comes from. On the other ranks, too.
        """
        if self.is_checked:
            return
        try:
            check_same_model(self.saved, slots, self._source)
        except ValueError:
            meet((1,))
            raise
        [has_failed] = meet((0,))
        if has_failed:
            raise ValueError(f"{self._source} is not used: another rank refuses its plan, and says why")
        self.is_checked = True


def take(saved: SavedPlan | None, source: str, budget_bytes: int, agree: Agree, meet: Agree) -> GivenPlan | None:
    """Take a plan to begin with; None if it takes more than the budget, or a rank has another, or none."""
    if saved is not None and saved.held_bytes > budget_bytes:
        logger.warning("%s takes more than gpu_budget (%s bytes): not used", source, f"{saved.held_bytes:,}")
        saved = None
    chosen = saved and [(slot, saved.allowance.choices.of(slot)) for slot in sorted(saved.allowance.slots)]
    is_unlike = not are_alike(agree, str(chosen))
    [cannot] = meet((int(saved is None or is_unlike),))
    if saved is None:
        return None
    if not cannot:
        return GivenPlan(saved, source)
    logger.warning("%s is not used: other ranks have another plan, or none", source)
    return None
