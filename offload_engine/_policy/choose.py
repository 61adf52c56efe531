# SPDX-License-Identifier: Apache-2.0
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
from offload_engine.config import OffloadConfig
from offload_engine.planning.shapes import Bounds
from offload_engine.policies import (
    FixedBounds,
    GroupWindow,
    LowestPeak,
    Planned,
    PolicySettings,
    PrefetchWindow,
    ResidentBudget,
    ResidentLayers,
    policy_for,
)


def settings_of(config: OffloadConfig) -> PolicySettings:
    """Return the policy that a configuration chooses, or else the default; under a budget, `Planned`."""
    if config.gpu_budget is not None:
        return Planned()
    return config.policy or LowestPeak()


def make_policy(chosen: PolicySettings, counters: ByteCounters, leaving: LeavingQueue) -> Policy:
    """Make the policy for `OffloadConfig.policy`."""
    if isinstance(chosen, Planned):
        bounds = Bounds(chosen.horizon_bytes, chosen.max_inflight_bytes, chosen.resident_bytes)
        return PlannedPolicy(counters, leaving, bounds, make_policy(_unplanned(chosen), counters, leaving))
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


def _unplanned(chosen: Planned) -> PolicySettings:
    """Return the reactive policy with the bounds of a planned one."""
    bounds = policy_for(
        resident_bytes=chosen.resident_bytes,
        horizon_bytes=chosen.horizon_bytes,
        max_inflight_bytes=chosen.max_inflight_bytes,
    )
    return bounds or LowestPeak()
