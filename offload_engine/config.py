# SPDX-License-Identifier: Apache-2.0
"""`OffloadConfig`: says what to offload, and within which bounds. Plain data that needs no torch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from offload_engine._compat.smp import smp_policy
from offload_engine.policies import (
    BOUNDS,
    LowestPeak,
    Planned,
    PolicySettings,
    ResidentBudget,
    ResidentLayers,
    policy_for,
)
from offload_engine.sizes import Size, parse_bytes, parse_size, size_setting

MIB = 1 << 20
HOST_POLICIES: tuple[str, ...] = ("keep", "error")
RECOMPUTE: tuple[str, ...] = ("auto", "off")
_LARGEST_STORAGE = 1 << 40


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Settings of one `OffloadEngine`.

    Raises:
        ValueError: if a value is outside its range, or the text of a budget is not a size, at construction.
        TypeError: if a size is not an integer.
    """

    min_tensor_bytes: int = MIB
    """Storages smaller than this stay on the device: a small copy wastes the link (64 KiB reach a tenth of it)."""

    host_limit_bytes: int | None = None
    """Upper bound on host-tier bytes of this process. None: four fifths of this process's share of the free bytes
    of the machine, the control group or the directory, measured when the host tier grows. Processes started by a
    launcher on one node have equal shares."""

    host_policy: Literal["keep", "error"] = "keep"
    """What to do with a group that does not fit below that bound: "keep" leaves it resident and counts it, "error"
    ends the step with an error that names it."""

    policy: PolicySettings | None = None
    """Decides what stays on the device, when compute waits, and when copy-ins are issued: one of
    `offload_engine.policies`. None: the default of the front-end, `LowestPeak()` unless its documentation says
    otherwise."""

    fraction: float = 1.0
    """Share, from 0 to 1, of the bytes that each chunk saves in groups, in the order of its forward, that may leave.
    The groups after it stay. From the second step on: the first shows how much there is. In CUDA graphs of layers it is
    spread over the forwards, rounded up to whole ones, and one does not count: all come back into as much memory."""

    kept_bytes: int = 0
    """How many bytes of groups stay on the device, over all chunks that wait for their backward: those that each chunk
    saves last. Applies from the second step on, as `fraction` does."""

    gpu_budget: int | str | None = None
    """Bytes that this process may hold on its GPU, CUDA context included (on the CPU device: bytes of saved tensors in
    groups). The engine measures a few steps and decides what stays; see docs/budget.md. A text is a size ("60GiB"),
    a share of the GPU ("90%") or "auto": all memory of the GPU, less twice its measured variation. None: `policy`
    decides."""

    recompute: Literal["auto", "off"] = "auto"
    """Whether a budget may recompute layers in backward instead of saving them, if that takes less time than copies.
    "auto": wherever the engine knows how and results stay equal; "off": nowhere."""

    directory: str | None = None
    """Where the CPU device keeps its host tier: a directory for a file-backed arena, "none" for plain memory,
    None for a temporary directory. CUDA devices use pinned memory and reject a directory."""

    cpu_affinity: bool = False
    """Bind this process to the CPUs of its GPU's memory node, before host memory is pinned. It stays bound after the
    engine is closed. Without a GPU, or if the machine does not report the node, a warning says why nothing changes."""

    dry_run: bool = False
    """Mark groups and account for their bytes, but move nothing: shows how much offload could move."""

    def __post_init__(self) -> None:
        if isinstance(self.gpu_budget, str):
            object.__setattr__(self, "gpu_budget", _read_budget(self.gpu_budget))
        for field in ("min_tensor_bytes", "host_limit_bytes", "kept_bytes", "gpu_budget"):
            self._check_size(field)
        if self.min_tensor_bytes > _LARGEST_STORAGE:
            raise ValueError(
                f"min_tensor_bytes={self.min_tensor_bytes:,} is more than any storage has: nothing could ever be "
                "offloaded. Lower the threshold. To measure without moving anything, set dry_run=True."
            )
        if self.policy is not None and not isinstance(self.policy, PolicySettings):
            raise TypeError(
                f"policy must be an object such as LowestPeak() or ResidentBudget(nbytes), got {self.policy!r}"
            )
        self._check_share()
        if self.gpu_budget is not None:
            self._check_budget()
        if self.host_policy not in HOST_POLICIES:
            raise ValueError(f"host_policy must be one of {', '.join(HOST_POLICIES)}, got {self.host_policy!r}")
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)}, got {self.recompute!r}")
        if self.host_limit_bytes is not None and self.host_limit_bytes < self.min_tensor_bytes:
            raise ValueError(
                f"host_limit_bytes={self.host_limit_bytes:,} is below min_tensor_bytes={self.min_tensor_bytes:,}: "
                "nothing could ever be offloaded. Raise the limit or lower the threshold."
            )
        if self.directory is not None and not isinstance(self.directory, (str, os.PathLike)):
            raise TypeError(f"directory must be a path, 'none' or None, got {self.directory!r}")
        for field in ("cpu_affinity", "dry_run"):
            if not isinstance(getattr(self, field), bool):
                raise TypeError(f"{field} must be True or False, got {getattr(self, field)!r}")

    def _check_budget(self) -> None:
        if self.policy not in (None, LowestPeak(), Planned()):
            raise ValueError(
                f"gpu_budget={self.budget_text} and policy={self.policy!r} both decide what stays on the device: set "
                "one of them"
            )
        if self.dry_run:
            raise ValueError(f"gpu_budget={self.budget_text} measures what moves, and dry_run moves nothing: omit one")

    @property
    def keeps_a_share(self) -> bool:
        """Return whether a part of each chunk's groups stays because of `fraction` or `kept_bytes`."""
        return self.fraction < 1.0 or self.kept_bytes > 0

    def _check_share(self) -> None:
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, (int, float)):
            raise TypeError(f"fraction must be a number from 0 to 1, got {self.fraction!r}")
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"fraction must be from 0 to 1, got {self.fraction:g}")
        if not self.keeps_a_share:
            return
        given = f"fraction={self.fraction:g}" if self.fraction < 1 else f"kept_bytes={self.kept_bytes:,}"
        other = "policy" if isinstance(self.policy, (Planned, ResidentBudget, ResidentLayers)) else None
        if other or self.gpu_budget is not None:
            raise ValueError(
                f"{given} and {other or 'gpu_budget'}={getattr(self, other or 'gpu_budget')} both decide what stays on "
                "the device: set one of them"
            )

    def _check_size(self, field: str) -> None:
        value = getattr(self, field)
        if field == "gpu_budget" and isinstance(value, str):  # read before
            return
        optional = type(self).__dataclass_fields__[field].default is None
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            text = ", or use OffloadConfig.from_flags for a size as text" if isinstance(value, str) else ""
            raise TypeError(f"{field} must be an integer number of bytes, such as 60 << 30{text}; got {value!r}")
        if value < 0:
            raise ValueError(f"{field} must not be negative, got {value:,}")

    @property
    def budget_text(self) -> str:
        """Return `gpu_budget` for a message."""
        return repr(self.gpu_budget) if not isinstance(self.gpu_budget, int) else f"{self.gpu_budget:,}"

    @classmethod
    def from_flags(cls, **settings: Any) -> OffloadConfig:
        """Return the configuration for command-line settings, where each bound of a policy is a flag of its own.

        Args:
            settings: fields of this class except `policy`, and the arguments of `policies.policy_for`. A size may be
                text, as "60GiB"; see `sizes.parse_bytes`.

        Raises:
            ValueError: if bounds belong to several policies, a value is outside its range, or a text is not a size.
            TypeError: if a value has the wrong type, or a setting is unknown.
        """
        if "policy" in settings:
            raise TypeError(
                f"policy={settings['policy']!r} is not a setting of a command line, where the bounds of a policy are "
                "settings of their own: a policy goes into OffloadConfig(policy=...)"
            )
        settings = {name: _in_bytes(name, value) for name, value in settings.items()}
        bounds = {name: settings.pop(name) for name in BOUNDS if name in settings}
        return cls(**settings, policy=policy_for(**bounds))

    @classmethod
    def from_smp(cls, config: Mapping[str, Any] | str | os.PathLike[str]) -> OffloadConfig:
        """Return the configuration for an unchanged SageMaker model parallel (SMP) configuration.

        SMP v2: `activation_loading_horizon` (positive integer, default 2) becomes `policies.GroupWindow`. If
        `sm_activation_offloading` (default true) is false, SMP uses PyTorch's own offload, which moves every activation
        but overlaps no copy; the result does the same, with a warning.

        SMP v1, recognized by `offload_activations`: `activation_loading_horizon` (default 4) becomes
        `policies.PrefetchWindow`.

        All other keys (`hybrid_shard_degree`, `tensor_parallel_degree`, `pipeline_parallel_degree`, ...) do not concern
        activation offload; a log record of level INFO lists them.

        Args:
            config: the configuration, or the path of a JSON file that holds it.

        Raises:
            TypeError: if the configuration, or a value in it, has the wrong type.
            ValueError: if a value is outside its range, a key is misspelt, or `offload_activations` is false.
            OSError: if the file cannot be read.
        """
        return cls(policy=smp_policy(config))

    def with_default(self, policy: PolicySettings) -> OffloadConfig:
        """Return this configuration with a default policy, unless it has a policy, a budget or a share already."""
        is_decided = self.policy is not None or self.gpu_budget is not None or self.keeps_a_share
        return self if is_decided else self.replace(policy=policy)

    def replace(self, **changes: object) -> OffloadConfig:
        """Return a copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def _read_budget(text: str) -> int | str:
    """Return a budget in bytes, or the text of one that depends on the memory of a GPU."""
    size = size_setting("gpu_budget", text, parse_size)
    assert isinstance(size, Size)
    return str(size) if size.nbytes is None else size.nbytes


def _in_bytes(name: str, value: Any) -> Any:
    """Return the value of a setting; a size given as text becomes a number of bytes."""
    if not (isinstance(value, str) and name.endswith("_bytes")):
        return value
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
