# SPDX-License-Identifier: Apache-2.0
"""Processes bound to the CPUs near their GPU, as a made-up `/sys` tells; real threads, in a process of their own."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from offload_engine import OffloadConfig, OffloadEngine
from offload_engine._devices import affinity
from offload_engine._devices.affinity import bind_to_gpu
from offload_engine._devices.cpu import CpuDevice

GPUS = {0: 0x1B, 1: 0x9A, 2: 0x9B, 3: 0x9C, 4: 0x9D}
CPUS = sorted(os.sched_getaffinity(0))
ALL = frozenset(range(16))


def write(root: Path, gpu: int, cpus: str) -> None:
    folder = root / f"sys/bus/pci/devices/0000:{GPUS[gpu]:02x}:00.0"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "local_cpulist").write_text(cpus)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with two memory nodes and a GPU at each, and GPUs of which it tells nothing that helps."""
    for gpu, cpus in enumerate(("0-3,8-11\n", "4-7,12-15\n", "all of them\n", "\n")):
        write(tmp_path, gpu, cpus)
    return tmp_path


def properties(device: torch.device) -> SimpleNamespace:
    """Return what torch tells of a GPU, which was less in older versions."""
    address = {"pci_domain_id": 0, "pci_bus_id": GPUS.get(device.index), "pci_device_id": 0}
    return SimpleNamespace(**(address if device.index in GPUS else {}))


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[int]]:
    """Stand in for the kernel: which CPUs each thread of this process may use; thread 9 has ended meanwhile."""
    cpus = {7: set(ALL), 8: set(ALL)}

    def get(thread: int) -> set[int]:
        if thread == 9:
            raise ProcessLookupError
        return cpus[thread or 7]

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(affinity, "_threads", lambda: [7, 8, 9])
    monkeypatch.setattr(os, "sched_getaffinity", get)
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, of_thread: cpus.update({thread: set(of_thread)}))
    return cpus


UNTOLD = "this machine does not report which CPUs are near it"


@pytest.mark.parametrize(
    ("gpu", "before", "after", "text"),
    [
        (0, (ALL, ALL), ({0, 1, 2, 3, 8, 9, 10, 11},) * 2, "bound to CPUs 0-3,8-11, which are near cuda:0"),
        (1, (ALL, ALL), ({4, 5, 6, 7, 12, 13, 14, 15},) * 2, "bound to CPUs 4-7,12-15, which are near cuda:1"),
        (0, ({2, 3, 4, 5}, {5}), ({2, 3}, {5}), "bound to CPUs 2-3"),  # the second thread has none that is near
        (0, ({4, 6}, {4}), None, "may use CPUs 4,6 only, and near cuda:0 are 0-3,8-11: it is not bound"),
        *((gpu, (ALL, ALL), None, UNTOLD) for gpu in (2, 3, 4, 5)),  # what is told of these: see `root`
    ],
)
def test_each_rank_gets_the_cpus_of_its_gpu_and_none_that_was_forbidden(
    gpu: int,
    before: tuple[set[int], set[int]],
    after: tuple[set[int], set[int]] | None,
    text: str,
    root: Path,
    threads: dict[int, set[int]],
) -> None:
    threads.update(zip((7, 8), before, strict=True))
    for _ in range(2):  # and a second engine of the process
        binding = bind_to_gpu(torch.device("cuda", gpu), root)
        assert threads == dict(zip((7, 8), after or before, strict=True))
        assert binding.cpus == (after[0] if after else set()) and text in binding.text


def test_an_engine_binds_only_if_asked_and_before_it_pins(
    root: Path, threads: dict[int, set[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = CpuDevice("none")
    OffloadEngine(OffloadConfig(cpu_affinity=True), CpuDevice("none")).close()
    assert "not bound to the CPUs near cpu: it is no GPU" in caplog.text
    device.torch_device = torch.device("cuda", 1)
    monkeypatch.setattr(affinity.bind_to_gpu, "__defaults__", (root,))
    monkeypatch.setattr(device, "new_slab", lambda _: pytest.fail("pinned before it was bound"))
    OffloadEngine(OffloadConfig(), device)
    assert threads[8] == ALL
    OffloadEngine(OffloadConfig(cpu_affinity=True), device).close()
    assert threads[8] == {4, 5, 6, 7, 12, 13, 14, 15}


def _bind_for_real(root: Path) -> list[set[int]]:
    """Return the CPUs of this thread, of one that runs already, and of one that starts afterwards."""
    torch.cuda.get_device_properties = properties  # type: ignore[assignment]
    found: list[set[int]] = []
    is_bound = threading.Event()

    def look() -> None:
        is_bound.wait()
        found.append(os.sched_getaffinity(0))

    early, late = threading.Thread(target=look), threading.Thread(target=look)
    early.start()
    bind_to_gpu(torch.device("cuda", 0), root)
    is_bound.set()
    late.start()
    for thread in (early, late):
        thread.join()
    return [os.sched_getaffinity(0), *found]


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs to leave one out")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of a fork beside threads
def test_threads_that_run_and_threads_that_come_are_bound(tmp_path: Path) -> None:
    write(tmp_path, 0, f"{CPUS[-1]}\n")
    with ProcessPoolExecutor(1, get_context("fork")) as process:
        assert process.submit(_bind_for_real, tmp_path).result(60) == [{CPUS[-1]}] * 3
