# SPDX-License-Identifier: Apache-2.0
"""Pinned slabs without a GPU: everything but the registration itself, which is a recorder here."""

from __future__ import annotations

import gc
import logging
import os
import platform
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from offload_engine._devices import pinned
from offload_engine._devices.cuda import CudaDevice
from offload_engine._devices.pinned import PinnedSlab, numa_node_of

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
    ("nodes", "numa_node", "does_tell", "expected"),
    [
        (1, "0\n", True, None),
        (2, "1\n", True, 1),
        (2, "-1\n", True, None),
        (2, "garbled", True, None),
        (2, "1", 0, None),
    ],
)
def test_the_memory_node_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, numa_node: str, does_tell: bool, expected: int | None
) -> None:
    for node in range(nodes):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    folder = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(numa_node)
    properties = {"pci_domain_id": 0, "pci_bus_id": 0x1B, "pci_device_id": 0} if does_tell else {}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
    assert numa_node_of(torch.device("cuda", 0), tmp_path) == expected


def test_cuda_without_a_gpu_and_with_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="CpuDevice"):
        CudaDevice()
    with pytest.raises(ValueError, match="host_limit_bytes"):
        CudaDevice(directory="/tmp")
