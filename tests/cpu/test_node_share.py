# SPDX-License-Identifier: Apache-2.0
"""A process's share of its node's memory, whoever starts first, and pinned slabs without a GPU."""

from __future__ import annotations

import gc
import logging
import os
import platform
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from offload_engine._devices import node_share, pinned
from offload_engine._devices.cpu import CpuDevice
from offload_engine._devices.cuda import CudaDevice
from offload_engine._devices.host_memory import available_host_bytes
from offload_engine._devices.node_share import num_processes_of_node, share_of_memory
from offload_engine._devices.pinned import PinnedSlab, numa_node_of
from offload_engine._host.slabs import DEFAULT_SHARE
from tests.dist.launch import PlainGroup, run_ranks

GIB = 1 << 30
TOTAL = 1024 * GIB
AGENT, THREADS = 100, (100, 101)  # both threads have started processes


def test_launchers_say_how_many_processes_a_node_has() -> None:
    cases: list[tuple[dict[str, str], int]] = [
        ({}, 1),
        ({"WORLD_SIZE": "64"}, 1),  # how many of them are here is not known
        ({"LOCAL_WORLD_SIZE": "8", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, 8),  # torchrun in one task a node
        ({"LOCAL_WORLD_SIZE": ""}, 1),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({"LOCAL_SIZE": "4"}, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"MPI_LOCALNRANKS": "3"}, 3),
        ({"SLURM_STEP_TASKS_PER_NODE": "4,8(x2)"}, 8),
    ]
    for variables, num in cases:
        assert num_processes_of_node(variables) == num, variables


class Node:
    """A machine that shows its processes in `/proc`: children of an agent, which hold some memory, as do others."""

    def __init__(self, root: Path, held: dict[int, int], others: int = 0) -> None:
        self.root, self.held, self.others = root, held, others
        for folder in (*(f"{AGENT}/task/{thread}" for thread in THREADS), *map(str, held)):
            (root / "proc" / folder).mkdir(parents=True)

    @property
    def free(self) -> int:
        return TOTAL - self.others - sum(self.held.values())

    def may_take(self, pid: int, num_processes: int = 8) -> int:
        """Return what `pid` sees as its share."""
        proc, pids = self.root / "proc", sorted(self.held)
        (proc / "meminfo").write_text(f"MemTotal: {TOTAL >> 10} kB\nMemAvailable: {self.free >> 10} kB\n")
        for thread, children in zip(THREADS, (pids[::2], [*pids[1::2], 999]), strict=True):  # 999 has ended
            (proc / f"{AGENT}/task/{thread}/children").write_text(" ".join(map(str, children)) + " ")
        for each, held in self.held.items():
            text = f"Name:\tpython\nPid:\t{each}\nPPid:\t{AGENT}\nVmRSS:\t 1 kB\nRssAnon:\t{held >> 10:8} kB\n"
            (proc / f"{each}/status").write_text(text)
        (proc / "self").unlink(missing_ok=True)
        (proc / "self").symlink_to(str(pid))
        return share_of_memory(self.root, {"LOCAL_WORLD_SIZE": str(num_processes)})


@pytest.mark.parametrize(("heap", "others"), [(0, 0), (20 * GIB, 0), (0, TOTAL // 2)])
def test_processes_that_start_one_after_the_other_get_the_same(heap: int, others: int, tmp_path: Path) -> None:
    """What they hold already counts for their share; memory of others is no part of what is shared."""
    node = Node(tmp_path, dict.fromkeys(range(1, 9), heap), others)
    assert sum(map(node.may_take, node.held)) == node.free, "what is promised at one moment is there"
    for pid in node.held:
        node.held[pid] += int(DEFAULT_SHARE * node.may_take(pid))  # all that a host pool would take
    share = DEFAULT_SHARE * ((TOTAL - others) / 8 - heap)
    pools = [held - heap for held in node.held.values()]
    assert min(pools) == pytest.approx(share, rel=1e-6) == max(pools) and sum(pools) <= 8 * share


def test_no_more_than_is_free_and_a_process_that_has_died_leaves_its_memory_to_the_others(tmp_path: Path) -> None:
    node = Node(tmp_path, {1: 900 * GIB, 2: 0}, others=120 * GIB)  # the first had a limit of its own
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


def _hold_and_look(nbytes: int) -> tuple[list[int], int]:
    """Return what this rank sees its siblings hold, before and after each took so much, and its own share of it."""
    held, looks = bytearray(), list[int]()
    for _ in range(2):
        looks.append(sum(map(node_share._anonymous_bytes, node_share._siblings(Path("/")))))
        torch.distributed.barrier()
        held = held or bytearray(b"x") * nbytes
        torch.distributed.barrier()
    return looks, share_of_memory()


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux")
def test_real_processes_see_each_other() -> None:
    nbytes = 64 << 20
    for (before, after), share in run_ranks(_hold_and_look, nbytes, world_size=3, pipeline=PlainGroup()):
        assert 1.9 * nbytes < after - before < 3 * nbytes
        assert 0 < share < available_host_bytes() / 2  # a third, less what it holds


MIB = 1 << 20


class Runtime:
    """Stands in for `torch.cuda.cudart()`."""

    cudaError = int

    def __init__(self) -> None:
        self.code = 0
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if self.code == 0:
            self.registered[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return "out of memory"


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


def test_a_slab_is_registered_whole_until_it_is_closed_or_dropped(runtime: Runtime) -> None:
    nbytes = 3 * MIB + 512
    slab = PinnedSlab(nbytes, numa_node=0)
    whole = slab.view(0, nbytes)
    assert runtime.registered == {whole.data_ptr(): nbytes} and not whole.any()
    slab.view(100, 7).fill_(3)
    assert whole.sum().item() == 21
    slab.close()
    slab.close()
    assert runtime.registered == {}
    whole.fill_(1)  # a view may outlive its slab
    with pytest.raises(RuntimeError, match="closed"):
        slab.view(0, 1)
    slab = PinnedSlab(MIB)
    assert runtime.registered
    del slab
    gc.collect()
    assert runtime.registered == {}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_forked_child_has_no_pinned_page_and_unregisters_nothing(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    slab = PinnedSlab(MIB)
    address = slab.view(0, 1).data_ptr()
    child = os.fork()
    if child == 0:
        os._exit(int(_is_mapped(address)))
    assert _is_mapped(address) and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)  # as a data loader's worker that closes what it has inherited
        slab.close()
    assert runtime.registered, "it is the parent's"


def _is_mapped(address: int) -> bool:
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


def test_a_refused_registration_is_a_memory_error(runtime: Runtime) -> None:
    runtime.code = 2
    with pytest.raises(MemoryError, match=r"cannot pin 1,048,576 bytes .*out of memory \(2\).*host_limit_bytes"):
        PinnedSlab(MIB)
    assert runtime.registered == {}


def test_a_node_or_a_machine_that_cannot_be_asked_is_skipped(
    runtime: Runtime, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.DEBUG, logger=pinned.__name__):
        PinnedSlab(MIB, numa_node=900).close()
    assert "pinned memory not placed on node 900" in caplog.text
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    PinnedSlab(MIB, numa_node=0).close()


@pytest.mark.parametrize(
    ("nodes", "numa_node", "expected"), [(1, "0\n", None), (2, "1\n", 1), (2, "-1\n", None), (2, "garbled", None)]
)
def test_the_memory_node_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, numa_node: str, expected: int | None
) -> None:
    for node in range(nodes):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    folder = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(numa_node)
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert numa_node_of(torch.device("cuda", 0), tmp_path) == expected
    del properties.pci_bus_id  # as torch's older versions
    assert numa_node_of(torch.device("cuda", 0), tmp_path) is None


def test_cuda_without_a_gpu_and_with_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="CpuDevice"):
        CudaDevice()
    with pytest.raises(ValueError, match="host_limit_bytes"):
        CudaDevice(directory="/tmp")
