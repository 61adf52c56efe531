"""Configurations from flat settings, where a test is about sizes and not about the policy that has them."""

from __future__ import annotations

from typing import Any

from offload_engine import FixedBounds, GroupWindow, OffloadConfig, PrefetchWindow, ResidentBudget
from offload_engine.policies import PolicySettings


def sized_config(**settings: Any) -> OffloadConfig:
    """`OffloadConfig(**settings)`, with the policy that the sizes among them belong to."""
    names = ("resident_bytes", "horizon_groups", "prefetch_layers", "horizon_bytes", "max_inflight_bytes")
    sizes = {name: settings.pop(name) for name in names if settings.get(name) is not None}
    settings = {name: value for name, value in settings.items() if name not in names}
    return OffloadConfig(**settings, policy=_policy(**sizes) if sizes else None)


def _policy(
    resident_bytes: int | None = None,
    horizon_groups: int | None = None,
    prefetch_layers: int | None = None,
    **bounds: int,
) -> PolicySettings:
    if resident_bytes is not None:
        assert not bounds
        return ResidentBudget(resident_bytes)
    if horizon_groups is not None:
        return GroupWindow(horizon_groups, **bounds)
    if prefetch_layers is not None:
        return PrefetchWindow(prefetch_layers, **bounds)
    return FixedBounds(**bounds)
