# SPDX-License-Identifier: Apache-2.0
"""Settings of the policies: how much stays on the device, when compute waits, what comes back when. No torch here.

A policy is chosen once, by `OffloadConfig.policy`. docs/plan.md says what each does at which boundary.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "FixedBounds",
    "GroupWindow",
    "LowestPeak",
    "Planned",
    "PolicySettings",
    "PrefetchWindow",
    "ResidentBudget",
    "ResidentLayers",
    "policy_for",
]


@dataclass(frozen=True)
class LowestPeak:
    """Copies each group out as early as possible and in as late as the link allows, for the lowest peak of memory.

    At most twice the largest group's bytes are in flight in each direction, and copy-ins are at most a layer ahead.
    Before the memory peaks of a step, compute waits for copy-outs that have had time to complete.
    """


@dataclass(frozen=True, kw_only=True)
class FixedBounds:
    """Works like `LowestPeak`, with a bound in bytes instead of one or both of its own.

    Raises:
        ValueError: if a bound is negative, or none is given.
        TypeError: if a bound is not an integer.
    """

    horizon_bytes: int | None = None
    """How many bytes of copy-in may be issued ahead of their use, of any layer; 0: none. None: as `LowestPeak`, which
    copies in only the last layer before the backward of a chunk has begun."""

    max_inflight_bytes: int | None = None
    """How many bytes of copy-out may be in flight before compute waits for the oldest, anywhere in a step. If the link
    is the bottleneck, a larger bound makes steps shorter and the peak higher (docs/performance.md). None: as
    `LowestPeak`, which waits for all but the last copies when the backward of another chunk begins."""

    def __post_init__(self) -> None:
        if self.horizon_bytes is None and self.max_inflight_bytes is None:
            raise ValueError("FixedBounds needs horizon_bytes or max_inflight_bytes; without both use LowestPeak()")
        _check_bytes(self, "horizon_bytes", "max_inflight_bytes")


@dataclass(frozen=True)
class ResidentBudget:
    """Keeps as many saved bytes on the device as fit into a budget; only the rest moves.

    Compute waits for a copy-out only if the budget would be exceeded. Copy-ins run as far ahead as the budget allows;
    during a forward they use at most a quarter of it. If the link is the bottleneck, a budget of the bytes that two
    forwards of a chunk save makes steps shorter than `LowestPeak`.

    Raises:
        ValueError: if the budget is negative.
        TypeError: if it is not an integer.
    """

    resident_bytes: int
    """How many bytes of saved tensors may be on the device at once, including the running group."""

    def __post_init__(self) -> None:
        _check_bytes(self, "resident_bytes")


@dataclass(frozen=True)
class ResidentLayers:
    """Works like a `ResidentBudget` of `num_layers` times the bytes of the largest layer so far; groups need layers.

    Raises:
        ValueError: if `num_layers` is below one.
        TypeError: if it is not an integer.
    """

    num_layers: int = 2
    """With 2, one layer computes while another is being copied."""

    def __post_init__(self) -> None:
        _check_count(self, "num_layers", "layers")


@dataclass(frozen=True)
class GroupWindow:
    """Keeps at most `num_groups` groups on the device: `activation_loading_horizon` of SageMaker's SMP v2.

    In forward these are groups being copied out, including one still in use; in backward, groups copied in and not
    released, including the one in use. Groups that a retained graph keeps after its first backward are not counted.

    Raises:
        ValueError: if `num_groups` is below one, or a bound is negative.
        TypeError: if a number is not an integer.
    """

    num_groups: int = 2
    """With 1, no copy overlaps compute."""

    max_inflight_bytes: int | None = None
    """See `FixedBounds`."""

    def __post_init__(self) -> None:
        _check_count(self, "num_groups", "groups")
        _check_bytes(self, "max_inflight_bytes")


@dataclass(frozen=True)
class PrefetchWindow:
    """Copies groups in up to `num_groups` ahead of the backward: `activation_loading_horizon` of SageMaker's SMP v1.

    Raises:
        ValueError: if `num_groups` is below one, or a bound is negative.
        TypeError: if a number is not an integer.
    """

    num_groups: int = 4
    """While the backward of a group runs, copy-ins of up to this many groups after it are issued."""

    max_inflight_bytes: int | None = None
    """See `FixedBounds`."""

    def __post_init__(self) -> None:
        _check_count(self, "num_groups", "groups")
        _check_bytes(self, "max_inflight_bytes")


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Plans the moves of `LowestPeak`, `FixedBounds` or a `ResidentBudget` before each step from the second on.

    For known schedules, such as those of pipelines: `OffloadEngine.plan` shows what the step does at which boundary.
    With a budget the plan knows what is needed next, and moves less than `ResidentBudget`, which guesses. The first
    step, and steps without a schedule, run under the reactive policy with the same bounds.

    Raises:
        ValueError: for a negative bound, and for a budget beside another bound.
        TypeError: for a bound that is not an integer.
    """

    horizon_bytes: int | None = None
    """See `FixedBounds`."""
    max_inflight_bytes: int | None = None
    """See `FixedBounds`."""
    resident_bytes: int | None = None
    """See `ResidentBudget`; None: no budget."""

    def __post_init__(self) -> None:
        _check_bytes(self, "horizon_bytes", "max_inflight_bytes", "resident_bytes")
        if self.resident_bytes is not None and (self.horizon_bytes, self.max_inflight_bytes) != (None, None):
            raise ValueError("resident_bytes replaces the other bounds: set it alone")


PolicySettings = Planned | LowestPeak | FixedBounds | ResidentBudget | ResidentLayers | GroupWindow | PrefetchWindow


BOUNDS: tuple[str, ...] = (
    "resident_bytes",
    "horizon_groups",
    "prefetch_groups",
    "horizon_bytes",
    "max_inflight_bytes",
    "planned",
)
"""The arguments of `policy_for`."""


def policy_for(
    *,
    resident_bytes: int | None = None,
    horizon_groups: int | None = None,
    prefetch_groups: int | None = None,
    horizon_bytes: int | None = None,
    max_inflight_bytes: int | None = None,
    planned: bool = False,
) -> PolicySettings | None:
    """Return the policy that the given bound selects; None if no bound is given.

    For command lines, where each bound is a flag of its own: `resident_bytes` is a `ResidentBudget`, `horizon_groups` a
    `GroupWindow`, `prefetch_groups` a `PrefetchWindow`, and the other two alone are `FixedBounds`. `planned` asks for
    `Planned` with the bounds in bytes.

    Raises:
        ValueError: if bounds belong to several policies, or a value is outside its range.
        TypeError: if a bound is not an integer.
    """
    counts = {"horizon_groups": horizon_groups, "prefetch_groups": prefetch_groups}
    exclusive = {"resident_bytes": resident_bytes, "horizon_bytes": horizon_bytes, **counts}
    given = [name for name, value in exclusive.items() if value is not None]
    if resident_bytes is not None and max_inflight_bytes is not None:
        given.append("max_inflight_bytes")
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} bound the same thing: set one of them")
    if planned:
        if horizon_groups is not None or prefetch_groups is not None:
            raise ValueError("a window of groups cannot be planned: omit planned")
        return Planned(
            horizon_bytes=horizon_bytes, max_inflight_bytes=max_inflight_bytes, resident_bytes=resident_bytes
        )
    if resident_bytes is not None:
        return ResidentBudget(resident_bytes)
    if horizon_groups is not None:
        return GroupWindow(horizon_groups, max_inflight_bytes)
    if prefetch_groups is not None:
        return PrefetchWindow(prefetch_groups, max_inflight_bytes)
    if horizon_bytes is None and max_inflight_bytes is None:
        return None
    return FixedBounds(horizon_bytes=horizon_bytes, max_inflight_bytes=max_inflight_bytes)


def _check_bytes(settings: object, *fields: str) -> None:
    for field in fields:
        value = getattr(settings, field)
        if value is None and not isinstance(settings, ResidentBudget):
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{field} must be an integer number of bytes, got {value!r}")
        if value < 0:
            raise ValueError(f"{field} must not be negative, got {value:,}")


def _check_count(settings: object, field: str, unit: str) -> None:
    value = getattr(settings, field)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{field} must be a positive number of {unit}, got {value!r}")
    if value < 1:
        raise ValueError(f"{field} must be a positive number of {unit}, got {value:,}")
