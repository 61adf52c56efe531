# SPDX-License-Identifier: Apache-2.0
"""`Keeping`: knows which groups are chosen to stay on the device, by their places, and how large they may be."""

from __future__ import annotations

from collections.abc import Mapping

from offload_engine._policy.policy import Policy
from offload_engine._policy.share import LeavingShare
from offload_engine._saved.counters import ByteCounters
from offload_engine._saved.storage import TensorGroup
from offload_engine.planning.choices import Allowance, Slot


class Keeping:
    """Tells the executor which groups stay, whatever the policy. It outlives executors, which a reset replaces.

    Args:
        policy: gets every allowance, too.
        counters: the engine's.
        share: decides how much of what each chunk saves may leave; None: all of it.

    Attributes:
        kept: bytes that each kept group may have, by its place; empty: none is kept.
        share: see the argument.
    """

    def __init__(self, policy: Policy, counters: ByteCounters, share: LeavingShare | None = None) -> None:
        self.kept: Mapping[Slot, int] = {}
        self.share: LeavingShare | None = share
        self._resident_limit: int = 0
        self._policy = policy
        self._counters = counters

    def allow(self, allowance: Allowance) -> None:
        """Set what may be on the device from the next step on. Call it between two steps.

        Raises:
            ValueError: if the policy has no budget of resident bytes that can change.
        """
        self._policy.allow(allowance)
        self.kept, self._resident_limit = allowance.kept_bytes, allowance.resident_bytes

    def may_stay(self, group: TensorGroup) -> bool:
        """Return whether a group that commits is chosen to be kept, and no larger than when it was chosen."""
        nbytes = self._kept_bytes(group)
        if nbytes is None:
            return False
        if group.own_bytes <= nbytes and self._counters.resident_bytes <= self._resident_limit:
            return True
        self._counters.stats.num_outgrown_groups += 1
        return False

    def clear(self) -> None:
        """Forget the running step, for instance after an exception."""
        if self.share is not None:
            self.share.clear()

    def outgrows(self, group: TensorGroup) -> bool:
        """Return whether a group that was chosen to be kept must leave, because it has grown since."""
        return self._kept_bytes(group) is not None and not (group.stays or group.is_kept)

    def _kept_bytes(self, group: TensorGroup) -> int | None:
        """Return how many bytes a group may have and still be kept; None if it is not chosen to be kept."""
        return self.kept.get(Slot(group.chunk.stage, group.layer, group.name, group.part))
