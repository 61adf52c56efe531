# SPDX-License-Identifier: Apache-2.0
"""Equal shares of a node's memory, whoever starts first: in made-up `/proc` folders, and of real processes."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from offload_engine._devices import node_share
from offload_engine._devices.cpu import CpuDevice
from offload_engine._devices.host_memory import available_host_bytes
from offload_engine._devices.node_share import num_processes_of_node, share_of_memory
from offload_engine._host.slabs import DEFAULT_SHARE
from tests.dist.launch import PlainGroup, run_ranks

GIB = 1 << 30
TOTAL = 1024 * GIB
AGENT = 100


@pytest.mark.parametrize(
    ("variables", "num"),
    [
        ({}, 1),
        ({"WORLD_SIZE": "64"}, 1),  # how many of them are here is not known
        ({"LOCAL_WORLD_SIZE": "8", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, 8),  # torchrun in one task a node
        ({"LOCAL_WORLD_SIZE": ""}, 1),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({"LOCAL_SIZE": "4"}, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"MPI_LOCALNRANKS": "3"}, 3),
        ({"SLURM_STEP_TASKS_PER_NODE": "4,8(x2)"}, 8),
    ],
)
def test_launchers_say_how_many_processes_a_node_has(variables: dict[str, str], num: int) -> None:
    assert num_processes_of_node(variables) == num


class Node:
    """A machine that shows its processes in `/proc`: children of an agent, some of which hold memory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.held: dict[int, int] = {}
        self.others = 0
        for thread in (AGENT, AGENT + 1):  # both have started processes
            (root / f"proc/{AGENT}/task/{thread}").mkdir(parents=True)

    def start(self, pid: int, heap: int = 0) -> None:
        self.held[pid] = heap
        (self.root / f"proc/{pid}").mkdir()

    @property
    def free(self) -> int:
        return TOTAL - self.others - sum(self.held.values())

    def may_take(self, pid: int, num_processes: int = 8) -> int:
        """Return what `pid` sees as its share."""
        proc, pids = self.root / "proc", sorted(self.held)
        (proc / "meminfo").write_text(f"MemTotal: {TOTAL >> 10} kB\nMemAvailable: {self.free >> 10} kB\n")
        for thread, children in ((AGENT, pids[::2]), (AGENT + 1, [*pids[1::2], 999])):  # 999 has ended
            (proc / f"{AGENT}/task/{thread}/children").write_text(" ".join(map(str, children)) + " ")
        for each, held in self.held.items():
            text = f"Name:\tpython\nPid:\t{each}\nPPid:\t{AGENT}\nVmRSS:\t 1 kB\nRssAnon:\t{held >> 10:8} kB\n"
            (proc / f"{each}/status").write_text(text)
        (proc / "self").unlink(missing_ok=True)
        (proc / "self").symlink_to(str(pid))
        return share_of_memory(self.root, {"LOCAL_WORLD_SIZE": str(num_processes)})

    def grow_to_the_limit(self, pid: int, heap: int = 0) -> int:
        """Take all that a host pool would; return the bytes of the pool."""
        pool = self.held[pid] - heap
        room = int(DEFAULT_SHARE * (pool + self.may_take(pid))) - pool
        self.held[pid] += max(0, room)
        return self.held[pid] - heap


@pytest.mark.parametrize(("heap", "others"), [(0, 0), (20 * GIB, 0), (0, TOTAL // 2)])
def test_processes_that_start_one_after_the_other_get_the_same(heap: int, others: int, tmp_path: Path) -> None:
    """What they hold already counts for their share; memory of others is no part of what is shared."""
    node = Node(tmp_path)
    node.others = others
    for pid in range(1, 9):
        node.start(pid, heap)
    assert sum(node.may_take(pid) for pid in range(1, 9)) == node.free, "what is promised at one moment is there"
    pools = [node.grow_to_the_limit(pid, heap) for pid in range(1, 9)]
    share = DEFAULT_SHARE * ((TOTAL - others) / 8 - heap)
    assert min(pools) == pytest.approx(share, rel=1e-6) == max(pools) and sum(pools) <= 8 * share


def test_no_more_than_is_free_and_a_process_that_has_died_leaves_its_memory_to_the_others(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.start(1, heap=900 * GIB)  # it had a limit of its own
    node.start(2)
    node.others = 120 * GIB
    assert (node.may_take(1), node.may_take(2)) == (0, 4 * GIB)
    assert node.may_take(1, num_processes=1) == node.free == 4 * GIB, "alone a process may have all"
    del node.held[1]
    node.others = 0
    (tmp_path / "proc/1/status").unlink()
    assert node.may_take(2) == pytest.approx(TOTAL / 8, rel=1e-6)
    for file in tmp_path.glob(f"proc/{AGENT}/task/*/children"):
        file.unlink()  # as with a shell around each process, or a kernel that lists no children
    assert 0 < share_of_memory(tmp_path, {"LOCAL_WORLD_SIZE": "8"}) <= node.free / 8


def test_files_of_several_processes_share_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a disk the files of others are not known: each takes its share of what is left."""
    disk, taken = 64 << 20, 0
    monkeypatch.setattr("offload_engine._devices.cpu.free_bytes", lambda _: disk - taken)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with ExitStack() as stack:
        for _ in range(4):
            device = CpuDevice(tmp_path)
            stack.callback(device.close)
            share = device.free_host_bytes() // 4096 * 4096
            assert 0 < share <= (disk - taken) // 4
            stack.callback(device.new_slab(share).close)
            taken += share
            assert device.free_host_bytes() < 4096


def _hold_and_look(nbytes: int) -> list[int]:
    """Return what this rank sees its siblings hold, before and after each took so much, and its own share of it."""
    look = [_held_by_siblings()]
    torch.distributed.barrier()
    held = bytearray(b"x") * nbytes
    torch.distributed.barrier()
    look += [_held_by_siblings(), share_of_memory()]
    torch.distributed.barrier()
    assert len(held) == nbytes
    return look


def _held_by_siblings() -> int:
    return sum(map(node_share._anonymous_bytes, node_share._siblings(Path("/"))))


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux")
def test_real_processes_see_each_other() -> None:
    nbytes = 64 << 20
    for before, after, share in run_ranks(_hold_and_look, nbytes, world_size=3, pipeline=PlainGroup()):
        assert 1.9 * nbytes < after - before < 3 * nbytes
        assert 0 < share < available_host_bytes() / 2  # a third, less what it holds
