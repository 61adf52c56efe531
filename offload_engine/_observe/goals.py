# SPDX-License-Identifier: Apache-2.0
"""`Goals`: warns, once, about steps that run but gain nothing from offload."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

import torch

from offload_engine._compat import torch_private
from offload_engine.config import OffloadConfig
from offload_engine.counted import counted
from offload_engine.policies import ResidentBudget
from offload_engine.sizes import short_size
from offload_engine.stats import IterationStats

logger = logging.getLogger(__name__)

_MANY_LATE: Final = 0.25
"""Share of the groups that moved, above which late storages are worth a warning."""
_LATE_IN_A_ROW: Final = 3
_ALL: Final = 0.98
"""Share of the saved bytes above which all of them count as on the device at once."""
_FIRST_STEPS: Final = 2
"""Number of steps that allocate host memory and learn sizes, so that their copies may be late."""


class Goals:
    """Checks the counters of each step and warns, once for each goal that is missed.

    Args:
        config: the engine's.
        is_whole: the engine holds all that its model offloads; False if other ranks of a pipeline hold more, and the
            caller reports when nothing has moved.
    """

    def __init__(self, config: OffloadConfig, is_whole: bool) -> None:
        self._config = config
        self._is_whole = is_whole
        self._said: set[str] = set()
        self._num_steps = 0
        self._num_late = 0  # consecutive steps

    def check(self, stats: IterationStats) -> None:
        """Check the counters of a finished step."""
        self._num_steps += 1
        for goal, text in self._missed(stats):
            if goal not in self._said:
                self._said.add(goal)
                if _is_first_to_say(f"{goal}/{self._num_steps}"):
                    logger.warning("%s", text)

    def _missed(self, stats: IterationStats) -> Iterator[tuple[str, str]]:
        if stats.num_host_limit_groups:
            yield "host", _host_text(stats, self._config.host_limit_bytes)
        if not stats.num_groups or self._config.dry_run or self._config.gpu_budget is not None:
            return
        policy = self._config.policy
        mean_bytes = stats.managed_bytes // stats.num_groups
        if isinstance(policy, ResidentBudget) and policy.resident_bytes < mean_bytes:
            yield "budget", _budget_text(policy.resident_bytes, mean_bytes, stats)
        if self._is_whole and stats.managed_bytes and not (stats.copied_out_bytes or stats.num_host_limit_groups):
            yield "moved", _nothing_text(stats)
        elif self._is_whole and self._num_steps > _FIRST_STEPS and _holds_all(stats):
            yield "moved", _in_vain_text(stats)
        if self._is_late(stats):
            yield "late", _late_text(stats)

    def _is_late(self, stats: IterationStats) -> bool:
        is_late = stats.prefetch_misses > _MANY_LATE * stats.num_offloaded_groups
        self._num_late = self._num_late + 1 if is_late and self._num_steps > _FIRST_STEPS else 0
        return self._num_late >= _LATE_IN_A_ROW


def _host_text(stats: IterationStats, limit_bytes: int | None) -> str:
    share = "this process's share of the node's memory"
    limit = share if limit_bytes is None else f"host_limit_bytes={short_size(limit_bytes)}"
    return (
        f"{stats.num_host_limit_groups} of {counted(stats.num_groups, 'group')} stayed on the device: the host tier "
        f"had no room for them within {limit}. Raise host_limit_bytes, free host memory, or offload less."
    )


def _budget_text(limit_bytes: int, mean_bytes: int, stats: IterationStats) -> str:
    return (
        f"a budget of {short_size(limit_bytes)} for saved tensors is less than one group of {short_size(mean_bytes)}: "
        f"{short_size(stats.peak_resident_bytes)} were on the device at once, and compute waits for each copy. Set "
        "resident_bytes to at least a few groups, or omit it."
    )


def _nothing_text(stats: IterationStats) -> str:
    return (
        f"nothing moved: the {short_size(stats.managed_bytes)} saved in {counted(stats.num_groups, 'group')} stay on "
        "the device, because their backward comes at once or all of it fits into the bounds of the policy. With so few "
        "layers or so large a bound, offload gains nothing."
    )


def _holds_all(stats: IterationStats) -> bool:
    return stats.peak_resident_bytes >= _ALL * stats.managed_bytes > 0


def _in_vain_text(stats: IterationStats) -> str:
    moved, held, saved = map(short_size, (stats.copied_out_bytes, stats.peak_resident_bytes, stats.managed_bytes))
    return (
        f"nothing is gained: {moved} moved, and still {held} of the {saved} saved were on the device at once, as with "
        "two layers. Checkpoint the layers (enable_ckpt=True), name more of them, or train without offload."
    )


def _late_text(stats: IterationStats) -> str:
    late, moved = counted(stats.prefetch_misses, "storage"), counted(stats.num_offloaded_groups, "group")
    return (
        f"compute waits for copies: {late} came back after the backward had begun, with {moved} moved. Move less, or "
        "raise the horizon (FixedBounds(horizon_bytes=...), --offload-horizon-bytes); see docs/troubleshooting.md."
    )


def _is_first_to_say(what: str) -> bool:
    """Return whether this rank is the first to report `what`; without a process group there is one rank."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return True
    store = torch_private.default_store()
    if store is None:
        return bool(distributed.get_rank() == 0)
    return bool(distributed.PrefixStore("offload_engine/said", store).add(what, 1) == 1)
