"""What to offload and within which bounds. No torch here: a configuration is plain data."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Settings of one `OffloadEngine`.

    Raises:
        ValueError: for a value outside its range, when it is constructed.
        TypeError: for a size that is not an integer.
    """

    min_tensor_bytes: int = MIB
    """Storages smaller than this stay on the device: a small copy wastes the link (64 KiB reach a tenth of it)."""

    host_limit_bytes: int | None = None
    """Upper bound on host-tier bytes of this process; a group that finds no room stays resident and is counted.
    None: as much as the host tier has free."""

    horizon_bytes: int | None = None
    """How many bytes of copy-in may be issued ahead of their use. None: twice the largest group seen so far."""

    max_inflight_bytes: int | None = None
    """How many bytes of copy-out may wait for their release before the compute stream waits for the oldest.
    None: twice the largest group seen so far. With once, compute waits for copies that are nearly done; with four
    times, the peak of a pipeline grows and the step gains nothing (docs/benchmarks.md)."""

    directory: str | None = None
    """Where the CPU device keeps its host tier: a directory for a file-backed arena, "none" for plain memory,
    None for a temporary directory. CUDA devices use pinned memory and reject a directory."""

    dry_run: bool = False
    """Mark groups and account for their bytes, but move nothing: shows what offloading would have to work with."""

    def __post_init__(self) -> None:
        for field in ("min_tensor_bytes", "host_limit_bytes", "horizon_bytes", "max_inflight_bytes"):
            self._check_size(field)
        if self.host_limit_bytes is not None and self.host_limit_bytes < self.min_tensor_bytes:
            raise ValueError(
                f"host_limit_bytes={self.host_limit_bytes:,} is below min_tensor_bytes={self.min_tensor_bytes:,}: "
                "nothing could ever be offloaded. Raise the limit or lower the threshold."
            )
        if self.directory is not None and not isinstance(self.directory, (str, os.PathLike)):
            raise TypeError(f"directory must be a path, 'none' or None, got {self.directory!r}")

    def _check_size(self, field: str) -> None:
        value = getattr(self, field)
        optional = type(self).__dataclass_fields__[field].default is None
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{field} must be an integer number of bytes, got {value!r}")
        if value < 0:
            raise ValueError(f"{field} must not be negative, got {value:,}")

    def replace(self, **changes: object) -> OffloadConfig:
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]
