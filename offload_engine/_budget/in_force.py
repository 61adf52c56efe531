# SPDX-License-Identifier: Apache-2.0
"""`InForce`: puts decisions into force."""

from __future__ import annotations

from offload_engine._budget.decide import Decider
from offload_engine._budget.last_step import LastStep
from offload_engine._policy.keeping import Keeping
from offload_engine.planning.choices import Allowance, Choices, Slot


class InForce:
    """Puts decisions into force, between two steps.

    Args:
        decider: makes models recompute what was chosen.
        keeping: receives what to keep.
        last: its gauge is of the allocator that serves the steps.

    Attributes:
        recomputed: slots that the next step recomputes.
        is_settled: False in the first step with other groups, which no plan knows. It keeps none, or more would be on
            the device than was decided: groups that leave without a plan come back earlier.
    """

    def __init__(self, decider: Decider, keeping: Keeping, last: LastStep) -> None:
        self.recomputed: frozenset[Slot] = frozenset()
        self.is_settled: bool = True
        self._decider = decider
        self._keeping = keeping
        self._last = last
        self._arena_bytes = 0
        self._allowance = Allowance()

    def allow(self, allowance: Allowance) -> None:
        """Apply an allowance from the next step on, or from the one after it, if that recomputes something else."""
        self._allowance = allowance
        self._decider.apply(allowance.choices)
        self.is_settled &= allowance.choices.recomputed == self.recomputed
        self.recomputed = allowance.choices.recomputed
        self._keeping.allow(allowance if self.is_settled else Allowance(Choices(recomputed=self.recomputed)))
        if allowance.arena_bytes is not None:
            self._arena_bytes = allowance.arena_bytes

    def settle(self) -> bool:
        """Note that a step has run, so that its groups are known; return whether they were before it."""
        was_settled, self.is_settled = self.is_settled, True
        if not was_settled:
            self._keeping.allow(self._allowance)
        return was_settled

    def clear_allocator(self) -> None:
        """Replace what the allocator has reserved and does not use by the arena of the decision.

        A block that lasts from a step keeps its whole segment, which may be the last arena. So no more is reserved than
        makes the process hold what was predicted.
        """
        gauge, saved = self._last.gauge, self._decider.saved
        gauge.trim()
        if self._arena_bytes and saved is not None:
            gauge.reset()
            gauge.reserve(min(self._arena_bytes, saved.held_bytes - gauge.held_bytes()))
            gauge.reset()  # that was a peak
