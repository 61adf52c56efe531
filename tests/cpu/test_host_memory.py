# SPDX-License-Identifier: Apache-2.0
"""How much memory may still be taken, read from made-up `/proc` and `/sys` folders."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest

from offload_engine._devices import host_memory

GIB = 1 << 30


@pytest.mark.parametrize(
    ("of_process", "groups", "expected"),
    [
        (None, {}, 16 * GIB),
        (  # version 2: the tightest group above counts
            "0::/pod/container",
            {"pod/memory.max": 8 * GIB, "pod/memory.current": 6 * GIB}
            | {"pod/container/memory.max": "max", "pod/container/memory.current": 5 * GIB},
            2 * GIB,
        ),
        (  # inactive page cache counts as free
            "0::/",
            {"memory.max": 8 * GIB, "memory.current": 7 * GIB, "memory.stat": f"anon 1\ninactive_file {3 * GIB}"},
            4 * GIB,
        ),
        # A machine that grows with its use, as its group may have more: it shows 32 in all, 16 of them free.
        ("0::/", {"memory.max": 64 * GIB, "memory.current": 4 * GIB}, 60 * GIB),
        ("0::/", {"memory.max": 1000, "memory.current": 2000}, 0),
        (  # version 1, with a path of the host
            "3:cpu,cpuacct:/x\n4:memory:/docker/abc",
            {"memory/memory.limit_in_bytes": 4 * GIB, "memory/memory.usage_in_bytes": 3 * GIB},
            GIB,
        ),
        ("4:memory:/", {"memory/memory.limit_in_bytes": 1 << 63, "memory/memory.usage_in_bytes": 3 * GIB}, 16 * GIB),
    ],
)
def test_the_tightest_limit_counts(
    of_process: str | None, groups: dict[str, int | str], expected: int, tmp_path: Path
) -> None:
    files: dict[str, object] = {"proc/meminfo": "MemTotal: 33554432 kB\nMemFree: 1 kB\nMemAvailable: 16777216 kB"}
    if of_process is not None:
        files["proc/self/cgroup"] = of_process
    for name, content in {**files, **{f"sys/fs/cgroup/{name}": content for name, content in groups.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{content}\n")
    assert host_memory.available_host_bytes(tmp_path) == expected


def test_of_a_system_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for available, expected in ((None, 1 << 60), (-1, 5 * 4096), (3, 3 * 4096)):  # the second is as on macOS
        known = {"SC_PAGE_SIZE": 4096, "SC_AVPHYS_PAGES": available, "SC_PHYS_PAGES": 10}
        sysconf = mock.Mock(side_effect=ValueError if available is None else known.__getitem__)
        monkeypatch.setattr(os, "sysconf", sysconf)
        assert host_memory.available_host_bytes(tmp_path) == expected


def test_check_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: GIB)
    host_memory.check_memory(GIB - host_memory.HOST_RESERVE_BYTES, "tests")
    with pytest.raises(MemoryError, match="no room for 536,870,913 bytes of tests"):
        host_memory.check_memory(GIB - host_memory.HOST_RESERVE_BYTES + 1, "tests")
