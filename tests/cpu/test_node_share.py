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
from offload_engine._devices.node_share import num_processes_of_node, share_left, share_of_memory
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
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"LOCAL_WORLD_SIZE": "8", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, 8),  # torchrun in one task a node
        ({"LOCAL_WORLD_SIZE": ""}, 1),
        ({"LOCAL_SIZE": "4"}, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"MPI_LOCALNRANKS": "3"}, 3),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x16)"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "4,8(x2)"}, 8),
    ],
)
def test_launchers_say_how_many_processes_a_node_has(variables: dict[str, str], num: int) -> None:
    assert num_processes_of_node(variables) == num


class Node:
    """A machine that shows its processes in `/proc`: children of an agent, some of which hold memory."""

    def __init__(self, root: Path, num_processes: int) -> None:
        self.root = root
        self.environ = {"LOCAL_WORLD_SIZE": str(num_processes)}
        self.held: dict[int, int] = {}
        self.others = 0
        (root / f"proc/{AGENT}/task/{AGENT}").mkdir(parents=True)
        (root / f"proc/{AGENT}/task/{AGENT + 1}").mkdir()

    def start(self, pid: int, heap: int = 0) -> None:
        self.held[pid] = heap
        (self.root / f"proc/{pid}").mkdir()

    @property
    def free(self) -> int:
        return TOTAL - self.others - sum(self.held.values())

    def may_take(self, pid: int) -> int:
        """Return what `pid` sees as its share."""
        self._show(pid)
        return share_of_memory(self.root, self.environ)

    def grow_to_the_limit(self, pid: int, heap: int = 0) -> int:
        """Take all that a host pool would; return the bytes of the pool."""
        pool = self.held[pid] - heap
        room = int(DEFAULT_SHARE * (pool + self.may_take(pid))) - pool
        self.held[pid] += max(0, room)
        return self.held[pid] - heap

    def _show(self, seen_by: int) -> None:
        proc = self.root / "proc"
        (proc / "meminfo").write_text(f"MemTotal: {TOTAL >> 10} kB\nMemAvailable: {self.free >> 10} kB\n")
        pids = sorted(self.held)
        # Two threads of the agent have started them.
        (proc / f"{AGENT}/task/{AGENT}/children").write_text(" ".join(map(str, pids[::2])) + " ")
        (proc / f"{AGENT}/task/{AGENT + 1}/children").write_text(
            " ".join(map(str, [*pids[1::2], 999]))
        )  # 999 has ended
        for pid, held in self.held.items():
            text = f"Name:\tpython\nPid:\t{pid}\nPPid:\t{AGENT}\nVmRSS:\t 1 kB\nRssAnon:\t{held >> 10:8} kB\n"
            (proc / f"{pid}/status").write_text(text)
        (proc / "self").unlink(missing_ok=True)
        (proc / "self").symlink_to(str(seen_by))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, 8)


def test_processes_that_start_one_after_the_other_get_the_same(node: Node) -> None:
    pools = []
    for pid in range(1, 9):
        node.start(pid)
        pools.append(node.grow_to_the_limit(pid))
    assert sum(pools) <= DEFAULT_SHARE * TOTAL
    assert min(pools) == pytest.approx(DEFAULT_SHARE * TOTAL / 8, rel=1e-6) == max(pools)


def test_what_is_promised_at_one_moment_is_there(node: Node) -> None:
    """All eight look before any of them takes: together they promise no byte twice."""
    for pid in range(1, 9):
        node.start(pid, heap=pid * GIB)
    assert sum(node.may_take(pid) for pid in range(1, 9)) == node.free


def test_a_heap_counts_for_the_share(node: Node) -> None:
    for pid in range(1, 9):
        node.start(pid, heap=20 * GIB)
    pools = [node.grow_to_the_limit(pid, heap=20 * GIB) for pid in range(1, 9)]
    share = DEFAULT_SHARE * (TOTAL / 8 - 20 * GIB)
    assert min(pools) == pytest.approx(share, rel=1e-6) and sum(pools) <= 8 * share


def test_memory_of_others_is_no_part_of_what_is_shared(node: Node) -> None:
    node.others = TOTAL // 2
    for pid in range(1, 9):
        node.start(pid)
        assert node.grow_to_the_limit(pid) == pytest.approx(DEFAULT_SHARE * TOTAL / 16, rel=1e-6)
    assert node.free > 0


def test_no_more_than_is_free(node: Node) -> None:
    node.start(1, heap=900 * GIB)  # it had a limit of its own
    node.start(2)
    node.others = 120 * GIB
    assert node.may_take(1) == 0
    assert node.may_take(2) == 4 * GIB


def test_a_process_that_has_died_leaves_its_memory_to_the_others(node: Node) -> None:
    for pid in (1, 2):
        node.start(pid)
        before = node.grow_to_the_limit(pid)
    del node.held[1]
    (node.root / "proc/1/status").unlink()
    assert node.grow_to_the_limit(2) == pytest.approx(before, rel=1e-6)
    node.start(3)
    assert node.grow_to_the_limit(3) == pytest.approx(before, rel=1e-6)


def test_where_the_others_cannot_be_seen_the_share_is_smaller(node: Node) -> None:
    """As with a shell around each process, or a kernel that lists no children."""
    pools = []
    for pid in range(1, 9):
        node.start(pid)
        node._show(pid)
        for file in node.root.glob(f"proc/{AGENT}/task/*/children"):
            file.unlink()
        room = share_of_memory(node.root, node.environ)
        node.held[pid] += int(DEFAULT_SHARE * room)
        pools.append(node.held[pid])
    assert pools == sorted(pools, reverse=True) and pools[0] <= DEFAULT_SHARE * TOTAL / 8
    assert pools[-1] > 0


def test_alone_a_process_may_have_all(node: Node) -> None:
    node.environ = {}
    node.start(1, heap=GIB)
    assert node.may_take(1) == node.free


def test_files_of_several_processes_share_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a disk the files of others are not known: each takes its share of what is left."""
    disk = 64 << 20
    taken = 0
    monkeypatch.setattr("offload_engine._devices.cpu.free_bytes", lambda _: disk - taken)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with ExitStack() as stack:
        for _ in range(4):
            device = CpuDevice(tmp_path)
            stack.callback(device.close)
            share = device.free_host_bytes() // 4096 * 4096
            assert 0 < share <= (disk - taken) // 4
            slab = device.new_slab(share)
            stack.callback(slab.close)
            taken += share
            assert device.free_host_bytes() < 4096
    assert taken < disk


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


def test_the_share_of_nothing() -> None:
    assert share_left(0, 0, 0, 8) == 0
    assert share_left(800, 0, 0, 8) == 100
    assert share_left(100, 700, 700, 8) == 0
    assert node_share.num_processes_of_node({"LOCAL_WORLD_SIZE": "0"}) == 1
