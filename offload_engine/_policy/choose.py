"""Makes the policy that the configuration chooses."""

from __future__ import annotations

from offload_engine import policies
from offload_engine._policy.leaving import LeavingQueue
from offload_engine._policy.lowest_peak import (
    FixedBoundsPolicy,
    GroupWindowPolicy,
    LowestPeakPolicy,
    PrefetchWindowPolicy,
)
from offload_engine._policy.policy import Policy
from offload_engine._policy.resident import ResidentBudgetPolicy, ResidentLayersPolicy
from offload_engine._saved.counters import ByteCounters


def make_policy(chosen: policies.PolicySettings, counters: ByteCounters, leaving: LeavingQueue) -> Policy:
    """Make the policy for `OffloadConfig.policy`."""
    match chosen:
        case policies.FixedBounds(horizon_bytes=horizon_bytes, max_inflight_bytes=max_inflight_bytes):
            return FixedBoundsPolicy(counters, leaving, horizon_bytes, max_inflight_bytes)
        case policies.ResidentBudget(resident_bytes):
            return ResidentBudgetPolicy(counters, leaving, resident_bytes)
        case policies.ResidentLayers(num_layers):
            return ResidentLayersPolicy(counters, leaving, num_layers)
        case policies.GroupWindow(num_groups, max_inflight_bytes):
            return GroupWindowPolicy(counters, leaving, num_groups, max_inflight_bytes)
        case policies.PrefetchWindow(num_groups, max_inflight_bytes):
            return PrefetchWindowPolicy(counters, leaving, num_groups, max_inflight_bytes)
    return LowestPeakPolicy(counters, leaving)
