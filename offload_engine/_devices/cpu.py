# SPDX-License-Identifier: Apache-2.0
"""Implements the CPU device: real, asynchronous copies between memory and a host tier, without a GPU.

Each copy stream is a thread (`copy_worker.py`, which also says how errors propagate). The compute stream is the calling
thread: its work is complete when a call returns, so an event recorded on it is complete, and a wait on it blocks.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections.abc import Sequence
from typing import cast

import torch

from offload_engine._devices.base import (
    DeviceGraphs,
    Event,
    HostRead,
    HostRegion,
    HostSlab,
    MemoryGauge,
    PlainRead,
    Stream,
    TensorSpec,
    TimeMark,
)
from offload_engine._devices.copy_worker import (
    CopyableSlab,
    CopyEvent,
    CopyStream,
    CopyThread,
    CopyTimeMark,
    ProcessGuard,
)
from offload_engine._devices.file_slab import FileSlab, check_directory, free_bytes
from offload_engine._devices.memory_slab import MemorySlab
from offload_engine._devices.node_share import num_processes_of_node, share_left, share_of_memory
from offload_engine._devices.regions import check_copy, check_slab_size, new_buffer, whole

COMPUTE = "compute"
"""The one compute stream, which is the calling thread."""


class CpuDevice:
    """Owns the copy threads and the host tier of one engine on the CPU.

    Threads start with the first copy and files are opened with the first slab, so an unused device survives a fork. A
    used one belongs to its process, and raises in any other.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        """Validate the host tier; nothing is started or opened yet.

        Args:
            directory: of the file-backed host tier; None is the system's directory for temporary files, and
                "none" keeps the host tier in plain memory.

        Raises:
            FileNotFoundError: if the directory does not exist.
            NotADirectoryError: if it is not a directory.
            PermissionError: if it is not writable.
            ValueError: if it is too full for one minimal slab.
        """
        self.torch_device = torch.device("cpu")
        self.memory: MemoryGauge | None = None
        self.graphs: DeviceGraphs | None = None
        self.busy_ratio = 1.0
        self.directory = resolve_directory(directory)
        # Whole pages in a file: a partial one would be read before it is written.
        self.host_alignment = 64 if self.directory is None else 4096
        if self.directory is not None:
            check_directory(self.directory)
        self._guard = ProcessGuard()
        self._streams: list[CopyStream] = []
        self._slabs: weakref.WeakSet[FileSlab | MemorySlab] = weakref.WeakSet()
        self._ready = CopyEvent()
        self._ready.complete()
        # Also at interpreter exit: a thread must not be copying from memory that is being torn down.
        self._close = weakref.finalize(self, _shut_down, self._guard, self._streams, self._slabs)

    def __repr__(self) -> str:
        return f"CpuDevice(host tier in {self.directory or 'plain memory'})"

    def new_stream(self, name: str) -> Stream:
        stream = CopyStream(name, self._guard)
        self._streams.append(stream)
        return stream

    def current_stream(self) -> Stream:
        return COMPUTE

    def record_event(self, stream: Stream) -> Event:
        return self._ready if stream is COMPUTE else stream.record()

    def wait_event(self, stream: Stream, event: Event) -> None:
        if stream is COMPUTE:
            self.synchronize(event)
        elif not event.is_done:
            stream.wait(event)
        else:
            event.raise_failure()

    def wait_stream(self, stream: Stream, leader: Stream) -> None:
        self.wait_event(stream, self.record_event(leader))

    def is_copy_thread(self) -> bool:
        return CopyThread.is_current()

    def is_complete(self, event: Event) -> bool:
        return event.is_done and event.failure is None

    def synchronize(self, event: Event) -> None:
        if not event.is_done:
            self._guard.claim()  # in a forked child no thread would ever complete it
            event.wait()
        event.raise_failure()

    def mark_time(self, stream: Stream) -> TimeMark:
        if stream is not COMPUTE:
            return stream.mark()
        mark = CopyTimeMark()
        mark.strike()
        return mark

    def milliseconds_between(self, first: TimeMark, last: TimeMark) -> float:
        milliseconds: float = 1e3 * (last.seconds() - first.seconds())
        return milliseconds

    def allocate(self, nbytes: int, stream: Stream, spec: TensorSpec | None = None) -> torch.Tensor:
        return new_buffer(nbytes, spec, self.torch_device)

    def empty(self, storage: torch.UntypedStorage) -> None:
        storage.resize_(0)

    def restore(self, storage: torch.UntypedStorage, nbytes: int, stream: Stream) -> torch.Tensor:
        storage.resize_(nbytes)
        return whole(storage)

    def copy_out(self, stream: Stream, copies: Sequence[tuple[torch.Tensor, HostRegion]]) -> Event:
        for source, target in copies:
            check_copy(source, target)
        for source, target in copies:
            stream.write(source, target.slab, target.offset)
        return stream.record()

    def copy_in(self, stream: Stream, copies: Sequence[tuple[HostRegion, torch.Tensor]]) -> Event:
        for source, target in copies:
            check_copy(target, source)
        for source, target in copies:
            stream.read(source.slab, source.offset, target)
        return stream.record()

    def host_read(self, tensor: torch.Tensor) -> HostRead:
        return PlainRead(tensor)

    def free_host_bytes(self) -> int:
        if self.directory is None:
            return share_of_memory()
        held = sum(slab.nbytes for slab in self._slabs)  # bytes of other processes are not known
        return share_left(free_bytes(self.directory), held, held, num_processes_of_node())

    def new_slab(self, nbytes: int) -> HostSlab:
        check_slab_size(nbytes, self.host_alignment)
        self._guard.claim()
        slab = MemorySlab(nbytes) if self.directory is None else FileSlab(self.directory, nbytes)
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


def resolve_directory(directory: str | os.PathLike[str] | None) -> str | None:
    """Return the directory of the file-backed host tier; None if the host tier is plain memory."""
    if directory is None:
        return tempfile.gettempdir()
    path = os.fspath(directory)
    return None if path == "none" else path


def _shut_down(guard: ProcessGuard, streams: list[CopyStream], slabs: weakref.WeakSet[FileSlab | MemorySlab]) -> None:
    guard.is_closed = True
    if CopyThread.is_current():  # the garbage collector may run here, and the thread cannot join itself
        threading.Thread(target=_finish, args=(streams, slabs), name="offload-close").start()
    else:
        _finish(streams, slabs)


def _finish(streams: list[CopyStream], slabs: weakref.WeakSet[FileSlab | MemorySlab]) -> None:
    for stream in streams:
        stream.close()
    for slab in list(slabs):
        cast(CopyableSlab, slab).close()
