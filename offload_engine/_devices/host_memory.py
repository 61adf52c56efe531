# SPDX-License-Identifier: Apache-2.0
"""Measures the memory that this process may still take: free memory, within the limits of its control group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

HOST_RESERVE_BYTES = 512 << 20
"""Left free by the memory-backed host tiers, so that the process does not trigger the out-of-memory killer."""


_NO_LIMIT_BYTES = 1 << 60
"""Version 1 control groups write a number of this order if there is no limit."""


class _Group(NamedTuple):
    """Memory of one control group."""

    limit: int
    free: int


def available_host_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of memory still available: the least of `MemAvailable` and what each control group has left.

    Some virtual machines grow on demand (ballooning). If a control group allows more than the machine's total memory,
    we assume such a VM and use only the limits of the control groups.

    Args:
        root: directory of `/proc` and `/sys`; differs only in tests.
    """
    groups = list(_control_groups(root))
    free = [group.free for group in groups]
    if not groups or min(group.limit for group in groups) <= _machine_total(root):
        free.append(_machine_available(root))
    return max(0, min(free))


def check_memory(nbytes: int, purpose: str) -> None:
    """Check that `nbytes` of memory are available.

    Raises:
        MemoryError: if less than `nbytes` plus a reserve is available.
    """
    available = available_host_bytes()
    if nbytes + HOST_RESERVE_BYTES > available:
        raise MemoryError(
            f"no room for {nbytes:,} bytes of {purpose}: {available:,} available, "
            f"of which {HOST_RESERVE_BYTES:,} stay in reserve"
        )


def _machine_total(root: Path) -> int:
    return _key_values(root / "proc/meminfo").get("MemTotal:", _NO_LIMIT_BYTES) * 1024


def _machine_available(root: Path) -> int:
    fields = _key_values(root / "proc/meminfo")
    if "MemAvailable:" in fields:
        return fields["MemAvailable:"] * 1024
    return _of_another_system()


def _of_another_system() -> int:
    """Return the available memory without `/proc`; half of the total where only that is known, as on macOS."""
    for name, share in (("SC_AVPHYS_PAGES", 1), ("SC_PHYS_PAGES", 2)):
        with suppress(ValueError, OSError):  # the name is unknown here, or has no value
            pages = os.sysconf(name)
            if pages > 0:
                return pages * os.sysconf("SC_PAGE_SIZE") // share
    return _NO_LIMIT_BYTES  # an allocation that is too large fails


def _control_groups(root: Path) -> Iterator[_Group]:
    """Yield every control group above this process that has a limit, versions 1 and 2."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _groups_upwards(root / "sys/fs/cgroup", path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            yield from _groups_upwards(mount, path, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _groups_upwards(mount: Path, path: str, limit_file: str, usage_file: str) -> Iterator[_Group]:
    # Inside a container the path may be the host's and not exist here: the walk then ends at the mount itself,
    # which is the container's own group.
    group = mount / path.lstrip("/")
    while True:
        limit, usage = _number(group / limit_file), _number(group / usage_file)
        if limit is not None and usage is not None and limit < _NO_LIMIT_BYTES:
            yield _Group(limit, limit - usage + _reclaimable(group / "memory.stat"))
        if group == mount or mount not in group.parents:
            return
        group = group.parent


def _reclaimable(stat_file: Path) -> int:
    """Return the page cache that the kernel reclaims first: it counts as used, but is effectively free."""
    fields = _key_values(stat_file)
    return fields.get("total_inactive_file", fields.get("inactive_file", 0))


def _key_values(file: Path) -> dict[str, int]:
    rows = (line.split() for line in _read(file).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def _number(file: Path) -> int | None:
    text = _read(file).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
