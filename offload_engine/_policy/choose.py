"""Makes the policy that the configuration chooses."""

from __future__ import annotations

from offload_engine._policy.leaving import LeavingQueue
from offload_engine._policy.lowest_peak import (
    FixedBoundsPolicy,
    GroupWindowPolicy,
    LowestPeakPolicy,
    PrefetchWindowPolicy,
)
from offload_engine._policy.planned import PlannedPolicy
from offload_engine._policy.policy import Policy
from offload_engine._policy.resident import ResidentBudgetPolicy, ResidentLayersPolicy
from offload_engine._saved.counters import ByteCounters
from offload_engine.planning.shapes import Bounds
from offload_engine.policies import (
    FixedBounds,
    GroupWindow,
    Planned,
    PolicySettings,
    PrefetchWindow,
    ResidentBudget,
    ResidentLayers,
)


def make_policy(chosen: PolicySettings, counters: ByteCounters, leaving: LeavingQueue) -> Policy:
    """Make the policy for `OffloadConfig.policy`."""
    if isinstance(chosen, Planned):
        bounds = Bounds(chosen.horizon_bytes, chosen.max_inflight_bytes, chosen.resident_bytes)
        return PlannedPolicy(counters, leaving, bounds)
    if isinstance(chosen, FixedBounds):
        return FixedBoundsPolicy(counters, leaving, chosen.horizon_bytes, chosen.max_inflight_bytes)
    if isinstance(chosen, ResidentBudget):
        return ResidentBudgetPolicy(counters, leaving, chosen.resident_bytes)
    if isinstance(chosen, ResidentLayers):
        return ResidentLayersPolicy(counters, leaving, chosen.num_layers)
    if isinstance(chosen, GroupWindow):
        return GroupWindowPolicy(counters, leaving, chosen.num_groups, chosen.max_inflight_bytes)
    if isinstance(chosen, PrefetchWindow):
        return PrefetchWindowPolicy(counters, leaving, chosen.num_groups, chosen.max_inflight_bytes)
    return LowestPeakPolicy(counters, leaving)
