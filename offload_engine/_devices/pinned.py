# SPDX-License-Identifier: Apache-2.0
"""Allocates pinned host memory with several threads, on the memory node nearest to the GPU.

`cudaHostAlloc` touches the pages one by one while it pins them (1.6 GB/s). Touching them first, with several threads,
and registering them afterwards takes a fifth of the time, and does not round the size up.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from offload_engine._devices.host_memory import check_memory

logger = logging.getLogger(__name__)

MAX_TOUCHING_THREADS = 8
_MBIND = {"x86_64": 237, "aarch64": 235}  # system call numbers; glibc has no wrapper
_MPOL_PREFERRED = 1  # not MPOL_BIND: a full node must not kill the process while another has room
_HOST_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context of this process


class PinnedSlab:
    """Owns `nbytes` of page-locked memory, mapped for this slab alone."""

    def __init__(self, nbytes: int, numa_node: int | None = None) -> None:
        """Map, place, touch and register the memory.

        Args:
            nbytes: size of the slab.
            numa_node: preferred memory node, used while it has room; None: the system's choice.

        Raises:
            MemoryError: if the machine has no room for it, or CUDA does not register it.
        """
        check_memory(nbytes, "pinned host memory")
        self.nbytes = nbytes
        mapping = _map(nbytes)
        # The tensor owns the mapping from here on, so it is unmapped after the last view, never under one.
        self._bytes: torch.Tensor | None = torch.frombuffer(mapping, dtype=torch.uint8)
        self._address = address = self._bytes.data_ptr()
        if numa_node is not None:
            _prefer_node(address, nbytes, numa_node)
        _touch(address, nbytes)
        _register(address, nbytes)
        self._unregister = weakref.finalize(self, _unregister, address, mapping, os.getpid())
        self._unregister.atexit = False  # at exit the device closes its slabs, after its copies

    def __repr__(self) -> str:
        return f"PinnedSlab({self.nbytes:,} bytes)"

    @property
    def address(self) -> int:
        """Return the address of the first byte; valid until the slab is closed."""
        if self._bytes is None:
            raise RuntimeError(f"{self} is closed")
        return self._address

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return bytes `offset .. offset + nbytes` as a 1-D uint8 CPU tensor; do not keep it longer than the slab."""
        if self._bytes is None:
            raise RuntimeError(f"{self} is closed")
        return self._bytes[offset : offset + nbytes]

    def abandon(self) -> None:
        """Leave the memory pinned until the process ends: to unpin it may wait for the device."""
        self._unregister.detach()

    def close(self) -> None:
        """Unpin the memory and return it to the system. Idempotent; no copy may be in flight."""
        self._unregister()
        self._bytes = None


def numa_node_of(device: torch.device, root: Path = Path("/")) -> int | None:
    """Return the memory node nearest to a GPU, or None if there is only one or it is unknown.

    Args:
        device: a CUDA device with an index.
        root: directory of `/sys`; differs only in tests.
    """
    if len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) < 2:
        return None
    folder = pci_folder(device, root)
    try:
        node = -1 if folder is None else int((folder / "numa_node").read_text())
    except (OSError, ValueError) as error:  # a container without this part of /sys
        logger.debug("memory node of %s unknown: %s", device, error)
        return None
    return node if node >= 0 else None


def pci_folder(device: torch.device, root: Path) -> Path | None:
    """Return the folder in which the kernel describes a GPU; None if an older torch does not report its address.

    Args:
        device: a CUDA device with an index.
        root: directory of `/sys`.
    """
    properties: Any = torch.cuda.get_device_properties(device)  # its stubs lack the PCI address
    try:
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return None
    return root / "sys/bus/pci/devices" / address


def _map(nbytes: int) -> mmap.mmap:
    """Map private anonymous memory: shared memory would get no huge pages and count as a file."""
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no address range of {nbytes:,} bytes for pinned host memory: {error}") from error
    _advise(mapping, "MADV_HUGEPAGE")  # fewer pages to touch and to register
    # A fork, for instance for a data loader, would copy every pinned page into the child: exclude them.
    _advise(mapping, "MADV_DONTFORK")
    return mapping


def _advise(mapping: mmap.mmap, name: str) -> None:
    try:
        mapping.madvise(getattr(mmap, name))
    except (AttributeError, OSError) as error:  # only advice: a system without it works too
        logger.debug("no %s: %s", name, error)


def _prefer_node(address: int, nbytes: int, node: int) -> None:
    """Place untouched pages on a memory node; if that fails, the system places them."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_long(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(len(mask) * bits + 1),  # the kernel reads one bit less than this number
        ctypes.c_long(0),
    )
    if result != 0:
        logger.debug("pinned memory not placed on node %d: %s", node, os.strerror(ctypes.get_errno()))


def _touch(address: int, nbytes: int) -> None:
    """Write to every page, in parallel: memset releases the GIL."""
    num_threads = min(MAX_TOUCHING_THREADS, os.cpu_count() or 1)
    step = -(-nbytes // (num_threads * mmap.PAGESIZE)) * mmap.PAGESIZE

    def touch(offset: int) -> None:
        ctypes.memset(address + offset, 0, min(step, nbytes - offset))

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(touch, range(0, nbytes, step)))


def _register(address: int, nbytes: int) -> None:
    runtime = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(address, nbytes, _HOST_REGISTER_PORTABLE))
    if code != 0:
        reason = runtime.cudaGetErrorString(runtime.cudaError(code))
        _forget_last_error()
        raise MemoryError(
            f"CUDA cannot pin {nbytes:,} bytes of host memory: {reason} ({code}). "
            "Lower host_limit_bytes, or raise the limit on locked memory."
        )


def _forget_last_error() -> None:
    # CUDA keeps the error code, and the next kernel launch on this thread would report it. torch has no call that only
    # clears it, but has loaded the runtime into the global namespace of the process.
    runtime = ctypes.CDLL(None)
    if hasattr(runtime, "cudaGetLastError"):
        runtime.cudaGetLastError()


def _unregister(address: int, mapping: mmap.mmap, pid: int) -> None:
    """Unpin the memory; `mapping` is an argument so that it lives until then."""
    if pid != os.getpid():
        return  # a forked child, which has neither the memory nor a working CUDA
    code = int(torch.cuda.cudart().cudaHostUnregister(address))
    if code != 0:
        _forget_last_error()
        logger.warning("pinned host memory could not be unregistered (CUDA error %d)", code)
