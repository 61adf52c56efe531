# SPDX-License-Identifier: Apache-2.0
"""Implements the CUDA device: copies on side streams between device memory and pinned host memory.

It never calls `record_stream`, which would return blocks to the allocator at an uncontrolled time and make the process
grow. Instead the caller keeps each tensor until the event of its copy has completed, and buffers for copy-in come from
the pool of the compute stream that will use them.
"""

from __future__ import annotations

import logging
import os
import weakref
from functools import partial
from typing import Final

import torch

from offload_engine._compat import torch_private
from offload_engine._devices.base import CopyError, DeviceGraphs, Event, HostRead, MemoryGauge, Stream
from offload_engine._devices.cuda_memory import CudaMemory
from offload_engine._devices.cuda_routine import CudaRoutine
from offload_engine._devices.cuda_runtime import CudaRuntime
from offload_engine._devices.host_read import MappedReader
from offload_engine._devices.node_share import share_of_memory
from offload_engine._devices.pinned import PinnedSlab, numa_node_of
from offload_engine._devices.regions import check_slab_size, whole

logger = logging.getLogger(__name__)


_BUSY_RATIO: Final = 1.06
"""Of a GPU that reaches the limit of its power. (Dense models and mixtures of experts on twelve H200s: 1.02 to 1.11.
Some clocked at 1,830 to 1,940 MHz where a third of a step was waits for copies, and at 1,510 to 1,790 without:
attention took up to 1.12 times as long, matrix products 1.00 to 1.06.)"""


class CudaGraphs:
    """Implements `DeviceGraphs`, for captures of CUDA graphs on the device of a runtime."""

    def __init__(self, runtime: CudaRuntime, device: torch.device) -> None:
        self.is_capturing = torch_private.cuda_is_capturing
        self.record = runtime.record_graph
        self.new_routine = partial(CudaRoutine, runtime, device)
        self._runtime = runtime

    def settle(self) -> None:
        """See `DeviceGraphs.settle`."""
        self._runtime.check(self._runtime.calls.settle())


class CudaDevice:
    """Owns the copy streams and the pinned host tier of one engine on one GPU.

    A copy that fails on a GPU destroys the CUDA context: unlike on the CPU, there is no next step.
    """

    def __init__(
        self, torch_device: torch.device | str | int | None = None, directory: str | os.PathLike[str] | None = None
    ) -> None:
        """Bind to a GPU.

        Args:
            torch_device: the GPU whose tensors are moved; None: the current one.
            directory: must be None; only the CPU device has a host tier in a file.

        Raises:
            ValueError: if a directory is given, or `torch_device` is not a CUDA device.
            RuntimeError: if there is no CUDA device.
        """
        if directory is not None:
            raise ValueError(
                f"directory={os.fspath(directory)!r} is for machines without a GPU: with CUDA the host tier is "
                "pinned memory. Omit the directory, and bound the tier with host_limit_bytes."
            )
        if not torch.cuda.is_available():
            raise RuntimeError("no CUDA device found: use CpuDevice")
        self.torch_device = _with_index(torch_device)
        self.busy_ratio = _BUSY_RATIO
        self.host_alignment = 512  # as the device allocator's blocks: no two copies share a cache line
        self.memory: MemoryGauge | None = CudaMemory(self.torch_device)
        self._index: int = self.torch_device.index
        self._runtime = CudaRuntime(self.torch_device)
        # Bound directly to the runtime, because each group makes many of these calls.
        self.current_stream = partial(torch_private.cuda_current_stream, self._index)
        self.record_event, self.wait_event = self._runtime.record, self._runtime.wait
        self.wait_stream = self._runtime.wait_stream
        self.is_complete = self._runtime.is_complete
        self.is_copy_thread = bool  # returns False without a Python frame; called for each freed storage
        self.graphs: DeviceGraphs | None = CudaGraphs(self._runtime, self.torch_device)
        self.copy_out, self.copy_in = self._runtime.copy_out, self._runtime.copy_in
        self.allocate = self._runtime.allocate
        self.mark_time, self.milliseconds_between = self._runtime.mark_time, self._runtime.milliseconds_between
        self._reader: MappedReader | None = None  # made by the first read
        self._numa_node = numa_node_of(self.torch_device)
        self._slabs: weakref.WeakSet[PinnedSlab] = weakref.WeakSet()
        # Also at interpreter exit: memory must not be unmapped under a copy.
        self._close = weakref.finalize(self, _shut_down, self._slabs, self._runtime, os.getpid())

    def __repr__(self) -> str:
        return f"CudaDevice({self.torch_device}, memory node {self._numa_node})"

    def new_stream(self, name: str) -> Stream:
        # Default priority: the copy engine serves streams in the order of issue, whatever their priority.
        stream = self._runtime.new_stream()
        logger.debug("copy stream %s: %#x", name, stream)
        return stream

    def synchronize(self, event: Event) -> None:
        try:
            self._runtime.synchronize(event)
        except RuntimeError as error:
            raise CopyError(
                f"CUDA failed before or in a copy on {self.torch_device}: {error}. Restart the process."
            ) from error

    def empty(self, storage: torch.UntypedStorage) -> None:
        storage.resize_(0)

    def restore(self, storage: torch.UntypedStorage, nbytes: int, stream: Stream) -> torch.Tensor:
        with self._runtime.on(stream):  # resize_ allocates from the pool of the current stream
            storage.resize_(nbytes)
        return whole(storage)

    def host_read(self, tensor: torch.Tensor) -> HostRead:
        if self._reader is None:
            self._reader = MappedReader(self.torch_device, self._runtime)
        return self._reader.read(tensor)

    def free_host_bytes(self) -> int:
        return share_of_memory()

    def new_slab(self, nbytes: int) -> PinnedSlab:
        check_slab_size(nbytes, self.host_alignment)
        if not self._close.alive:
            raise RuntimeError("the CUDA device is closed: make a new one")
        slab = PinnedSlab(nbytes, self._numa_node)
        self._slabs.add(slab)
        return slab

    def close(self) -> None:
        alive = self._close.peek()
        if alive is not None:  # not `self._close()`, which runs only once: after an interrupt the next call continues
            shut_down, arguments = alive[1:3]
            shut_down(*arguments)
            self._close.detach()

    def abandon(self) -> None:
        self._close.detach()
        for slab in self._slabs:
            slab.abandon()


def _with_index(device: torch.device | str | int | None) -> torch.device:
    found = torch.device("cuda") if device is None else torch.device(device)
    if found.type != "cuda":
        raise ValueError(f"torch_device must be a CUDA device, got {found}")
    # Devices of tensors always have an index; a device without one would equal none of them.
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)


def _shut_down(slabs: weakref.WeakSet[PinnedSlab], runtime: CudaRuntime, pid: int) -> None:
    if pid != os.getpid():
        return  # a forked child, in which CUDA does not work
    try:
        runtime.finish()
    except RuntimeError as error:  # the context is lost, and every copy with it
        logger.warning("copies were lost: %s", error)
    for slab in list(slabs):
        slab.close()
    runtime.close()
