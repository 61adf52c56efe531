# SPDX-License-Identifier: Apache-2.0
"""Processes bound to the CPUs near their GPU, as a made-up `/sys` tells; real threads, in forked processes."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from offload_engine import OffloadConfig, OffloadEngine
from offload_engine._devices import affinity
from offload_engine._devices.affinity import bind_to_gpu
from offload_engine._devices.cpu import CpuDevice
from tests.dist.launch import run_ranks

GPUS = {0: 0x1B, 1: 0x9A}
CPUS = sorted(os.sched_getaffinity(0))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with two memory nodes and a GPU at each."""
    write(tmp_path, 0, "0-3,8-11\n")
    write(tmp_path, 1, "4-7,12-15\n")
    return tmp_path


def write(root: Path, gpu: int, cpus: str) -> None:
    folder = root / f"sys/bus/pci/devices/0000:{GPUS[gpu]:02x}:00.0"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "local_cpulist").write_text(cpus)


class Threads:
    """Stands in for the kernel: which CPUs each thread of this process may use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cpus = {7: set(range(16)), 8: set(range(16))}
        monkeypatch.setattr(affinity, "_threads", lambda: [*self.cpus, 9])  # 9 has ended meanwhile
        monkeypatch.setattr(os, "sched_getaffinity", lambda thread: self._of(thread))
        monkeypatch.setattr(os, "sched_setaffinity", self._set)

    def _of(self, thread: int) -> set[int]:
        if thread and thread not in self.cpus:
            raise ProcessLookupError
        return self.cpus[thread or 7]

    def _set(self, thread: int, cpus: set[int]) -> None:
        self.cpus[thread] = set(cpus)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    return Threads(monkeypatch)


def properties(device: torch.device) -> SimpleNamespace:
    return SimpleNamespace(pci_domain_id=0, pci_bus_id=GPUS[device.index], pci_device_id=0)


@pytest.mark.parametrize(("gpu", "near"), [(0, {0, 1, 2, 3, 8, 9, 10, 11}), (1, {4, 5, 6, 7, 12, 13, 14, 15})])
def test_each_rank_gets_the_cpus_of_its_gpu(root: Path, threads: Threads, gpu: int, near: set[int]) -> None:
    binding = bind_to_gpu(torch.device("cuda", gpu), root)
    assert threads.cpus == {7: near, 8: near}
    assert binding.cpus == near
    ranges = {0: "0-3,8-11", 1: "4-7,12-15"}[gpu]
    assert binding.text == f"cpu_affinity: bound to CPUs {ranges}, which are near cuda:{gpu}"
    assert bind_to_gpu(torch.device("cuda", gpu), root) == binding, "a second engine of the process"


@pytest.mark.parametrize(
    ("before", "after", "bound"),
    [({7: {2, 3, 4, 5}, 8: {5}}, {7: {2, 3}, 8: {5}}, {2, 3}), ({7: {4, 6}, 8: {4}}, {7: {4, 6}, 8: {4}}, set())],
    ids=["the second thread has none that is near", "no thread has one that is near"],
)
def test_what_was_forbidden_before_stays_forbidden(
    root: Path, threads: Threads, before: dict[int, set[int]], after: dict[int, set[int]], bound: set[int]
) -> None:
    threads.cpus = before
    binding = bind_to_gpu(torch.device("cuda", 0), root)
    assert binding.cpus == bound and threads.cpus == after
    assert bound or "may use CPUs 4,6 only, and near cuda:0 are 0-3,8-11: it is not bound" in binding.text


@pytest.mark.parametrize(
    "cpus", [None, "all of them\n", "\n", "0-3\n"], ids=["no file", "garbled", "empty", "older torch"]
)
def test_a_machine_that_does_not_tell_changes_nothing(
    tmp_path: Path, threads: Threads, monkeypatch: pytest.MonkeyPatch, cpus: str | None
) -> None:
    if cpus is not None:
        write(tmp_path, 0, cpus)
    if cpus == "0-3\n":  # there, but torch does not say at which address the GPU is
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace())
    binding = bind_to_gpu(torch.device("cuda", 0), tmp_path)
    assert not binding.cpus and threads.cpus == {7: set(range(16)), 8: set(range(16))}
    assert binding.text.endswith(
        "not bound to the CPUs near cuda:0: this machine does not report which CPUs are near it"
    )


def test_without_a_gpu_an_engine_warns_and_changes_nothing(threads: Threads, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        OffloadEngine(OffloadConfig(cpu_affinity=True), CpuDevice("none")).close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "not bound to the CPUs near cpu: it is no GPU" in caplog.text
    assert threads.cpus[7] == set(range(16))


def test_an_engine_binds_only_if_asked_and_before_it_pins(
    root: Path, threads: Threads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = CpuDevice("none")
    device.torch_device = torch.device("cuda", 1)
    monkeypatch.setattr(affinity.bind_to_gpu, "__defaults__", (root,))
    monkeypatch.setattr(device, "new_slab", lambda _: pytest.fail("pinned before it was bound"))
    with caplog.at_level(logging.INFO):
        OffloadEngine(OffloadConfig(), device)
        assert threads.cpus[8] == set(range(16)) and not caplog.records
        OffloadEngine(OffloadConfig(cpu_affinity=True), device).close()
    assert threads.cpus[8] == {4, 5, 6, 7, 12, 13, 14, 15}
    assert [record.levelname for record in caplog.records] == ["INFO"]


def _bind_for_real(root: Path) -> list[set[int]]:
    """Return the CPUs of this thread, of one that runs already, and of one that starts afterwards."""
    torch.cuda.get_device_properties = properties  # type: ignore[assignment]
    found: list[set[int]] = []
    is_bound = threading.Event()

    def look() -> None:
        is_bound.wait()
        found.append(os.sched_getaffinity(0))

    early = threading.Thread(target=look)
    early.start()
    bind_to_gpu(torch.device("cuda", 0), root)
    found.append(os.sched_getaffinity(0))
    is_bound.set()
    early.join()
    late = threading.Thread(target=look)
    late.start()
    late.join()
    return found


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs to leave one out")
def test_threads_that_run_and_threads_that_come_are_bound(tmp_path: Path) -> None:
    write(tmp_path, 0, f"{CPUS[-1]}\n")
    assert run_ranks(_bind_for_real, tmp_path, pipeline=None) == [[{CPUS[-1]}] * 3]
