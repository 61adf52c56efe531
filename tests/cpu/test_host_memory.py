# SPDX-License-Identifier: Apache-2.0
"""How much memory may still be taken, read from made-up `/proc` and `/sys` folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload_engine._devices import host_memory

GIB = 1 << 30


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        file = root / name.replace("__", "/").replace("dot", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, proc__meminfo="MemTotal: 33554432 kB\nMemFree: 1 kB\nMemAvailable: 16777216 kB\n")
    return tmp_path


def test_without_control_groups(root: Path) -> None:
    assert host_memory.available_host_bytes(root) == 16 * GIB


def test_version_2_takes_the_tightest_group_above(root: Path) -> None:
    write(
        root,
        proc__self__cgroup="0::/pod/container\n",
        sys__fs__cgroup__pod__memorydotmax=f"{8 * GIB}\n",
        sys__fs__cgroup__pod__memorydotcurrent=f"{6 * GIB}\n",
        sys__fs__cgroup__pod__container__memorydotmax="max\n",
        sys__fs__cgroup__pod__container__memorydotcurrent=f"{5 * GIB}\n",
    )
    assert host_memory.available_host_bytes(root) == 2 * GIB


def test_inactive_page_cache_counts_as_free(root: Path) -> None:
    write(
        root,
        proc__self__cgroup="0::/\n",
        sys__fs__cgroup__memorydotmax=f"{8 * GIB}\n",
        sys__fs__cgroup__memorydotcurrent=f"{7 * GIB}\n",
        sys__fs__cgroup__memorydotstat=f"anon 1\ninactive_file {3 * GIB}\n",
    )
    assert host_memory.available_host_bytes(root) == 4 * GIB


def test_version_1_with_a_path_of_the_host(root: Path) -> None:
    write(
        root,
        proc__self__cgroup="3:cpu,cpuacct:/x\n4:memory:/docker/abc\n",
        sys__fs__cgroup__memory__memorydotlimit_in_bytes=f"{4 * GIB}\n",
        sys__fs__cgroup__memory__memorydotusage_in_bytes=f"{3 * GIB}\n",
    )
    assert host_memory.available_host_bytes(root) == GIB


def test_a_machine_that_grows_with_its_use_is_known_by_a_group_that_may_have_more(root: Path) -> None:
    group = dict(sys__fs__cgroup__memorydotmax=f"{64 * GIB}\n", sys__fs__cgroup__memorydotcurrent=f"{4 * GIB}\n")
    write(root, proc__self__cgroup="0::/\n", **group)
    assert host_memory.available_host_bytes(root) == 60 * GIB  # of a machine that shows 32 in all, 16 of them free


def test_version_1_without_a_limit(root: Path) -> None:
    write(
        root,
        proc__self__cgroup="4:memory:/\n",
        sys__fs__cgroup__memory__memorydotlimit_in_bytes="9223372036854771712\n",
        sys__fs__cgroup__memory__memorydotusage_in_bytes=f"{3 * GIB}\n",
    )
    assert host_memory.available_host_bytes(root) == 16 * GIB


def test_never_negative(root: Path) -> None:
    write(
        root,
        proc__self__cgroup="0::/\n",
        sys__fs__cgroup__memorydotmax="1000\n",
        sys__fs__cgroup__memorydotcurrent="2000\n",
    )
    assert host_memory.available_host_bytes(root) == 0


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        ({"SC_AVPHYS_PAGES": 3, "SC_PHYS_PAGES": 10}, 3 * 4096),
        ({"SC_PHYS_PAGES": 10}, 5 * 4096),  # macOS
        ({"SC_AVPHYS_PAGES": -1, "SC_PHYS_PAGES": 10}, 5 * 4096),
        ({}, 1 << 60),
    ],
)
def test_of_a_system_without_proc(
    pages: dict[str, int], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sysconf(name: str) -> int:
        if name not in known:
            raise ValueError("unrecognized configuration name")
        return known[name]

    known = {"SC_PAGE_SIZE": 4096, **pages}
    monkeypatch.setattr(host_memory.os, "sysconf", sysconf)
    assert host_memory.available_host_bytes(tmp_path) == expected


def test_check_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: GIB)
    host_memory.check_memory(GIB - host_memory.HOST_RESERVE_BYTES, "tests")
    with pytest.raises(MemoryError, match="no room for 536,870,913 bytes of tests"):
        host_memory.check_memory(GIB - host_memory.HOST_RESERVE_BYTES + 1, "tests")
