# SPDX-License-Identifier: Apache-2.0
"""`InForce`: puts decisions into force."""

from __future__ import annotations

from offload_engine._budget.decide import Decider
from offload_engine._policy.keeping import Keeping
from offload_engine.planning.choices import Allowance, Slot


class InForce:
    """Puts decisions into force, between two steps.

    Args:
        decider: makes models recompute what was chosen.
        keeping: receives what to keep.

    Attributes:
        recomputed: slots that the next step recomputes.
        is_settled: False in the first step with other groups, which no plan knows.
    """

    def __init__(self, decider: Decider, keeping: Keeping) -> None:
        self.recomputed: frozenset[Slot] = frozenset()
        self.is_settled: bool = True
        self._decider = decider
        self._keeping = keeping

    def allow(self, allowance: Allowance) -> None:
        """Apply an allowance from the next step on."""
        self._keeping.allow(allowance)
        self._decider.apply(allowance.choices)
        self.is_settled &= allowance.choices.recomputed == self.recomputed
        self.recomputed = allowance.choices.recomputed
