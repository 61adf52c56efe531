# SPDX-License-Identifier: Apache-2.0
"""Defines the device seam: every stream, event, copy and allocation call of the engine.

Three implementations exist: CUDA, CPU (real copies by worker threads into a host arena), and, in the tests, an
adversarial device that delays every copy as long as the recorded order allows. The engine never calls
`torch.cuda` itself, so an ordering bug on one of them is an ordering bug on all.

Streams, events and time marks are opaque: only the device that made them reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import torch

from offload_engine._devices.regions import HostRegion as HostRegion
from offload_engine._devices.regions import HostSlab as HostSlab
from offload_engine._devices.regions import TensorSpec as TensorSpec
from offload_engine.planning.allocations import AllocationLog

Stream = Any
Event = Any
TimeMark = Any

COMPUTE: Final[Stream] = 0
"""In the calls of a `Routine`, stands for the stream that is passed to what `Routine.finish` returns."""


class CopyError(RuntimeError):
    """A copy between the device and the host tier failed (disk full, I/O error)."""


class HostRead(Protocol):
    """A small device tensor on its way to the host."""

    tensor: torch.Tensor
    """On the CPU. Valid after `wait()`, or after any work that follows the read on its stream."""

    def wait(self) -> torch.Tensor:
        """Block the host until the read is done; returns `tensor`."""


class PlainRead:
    """A read that completed at once."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor = tensor.detach().to("cpu")

    def wait(self) -> torch.Tensor:
        """Return the tensor; the read has completed."""
        return self.tensor


class MemoryGauge(Protocol):
    """Measures what this process holds on a device. Never waits for the device."""

    def peak_bytes(self) -> int:
        """Return the most that was allocated at once since `reset`."""

    def reset(self) -> None:
        """Start a new peak at the bytes allocated now."""

    def held_bytes(self) -> int:
        """Return the most bytes that the process held since `reset`: reserved by its allocator, and outside it."""

    def outside_bytes(self) -> int:
        """Return the bytes that the process holds outside its allocator."""

    def taken_bytes(self) -> int:
        """Return the bytes that are taken now: allocated, or outside the allocator."""

    def total_bytes(self) -> int:
        """Return the total memory of the device; 0 if it is not known."""

    def trim(self) -> None:
        """Return memory that is reserved and not in use to the device."""

    def reserve(self, nbytes: int) -> None:
        """Reserve memory at once, for the current stream. No-op for a negative number, or if the device has less."""

    def watch(self, on_shortage: Callable[[], None]) -> None:
        """Call a method, which is held weakly, whenever memory runs out, right before the error is raised.

        Not in `reserve`. Whoever allocates may catch the error.
        """

    def record(self) -> bool:
        """Start recording allocations, until `recorded`; return False, without effect, if that is not possible."""

    def count(self) -> int:
        """Return how many allocations and frees there have been, from any origin."""

    def recorded(self) -> AllocationLog | None:
        """Stop recording; return what was recorded. None: nothing, or not all."""


class Routine(Protocol):
    """Records calls once, to make them again and again, all at once and in the same order.

    Each stands for the `Device` method of the same name. An event stands for the last run that recorded it, and
    routines may wait for events of each other. The copied bytes must keep their addresses.
    """

    def record_event(self, stream: Stream) -> Event:
        """Add the record of an event on `stream`, or on `COMPUTE`."""

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Add a wait of `stream`, or of `COMPUTE`, for an event of this or of another routine."""

    def copy_out(self, stream: Stream, copies: list[tuple[torch.Tensor, HostRegion]]) -> Event:
        """Add copies on `stream`; return the event after the last byte."""

    def copy_in(self, stream: Stream, copies: list[tuple[HostRegion, torch.Tensor]]) -> Event:
        """Add copies on `stream`; return the event after the last byte."""

    def in_background(self) -> None:
        """Let the calls that are added from now on be made in another thread; none may be on `COMPUTE`.

        Later calls of the device and of other routines still come behind them, and the next one raises their error.
        """

    def finish(self) -> Callable[[Stream], None]:
        """Return the function that makes the calls, with the stream that it is given for `COMPUTE`.

        No call may be added from now on. The function raises `CopyError` if a call is refused; those after it are not
        made.
        """


class DeviceGraphs(Protocol):
    """Lets the calls of a device become a part of a CUDA graph."""

    def is_capturing(self) -> bool:
        """Return whether the current stream captures its work into a graph instead of running it."""

    def record(self, is_recording: bool) -> None:
        """Start, or stop, issuing only what a capture can record. No work of the device may be in flight.

        In between, each copy is issued separately, only events that were known to have completed before count as
        complete, and `Device.synchronize` returns at once, because nothing runs.
        """

    def new_routine(self) -> Routine:
        """Make a routine without any calls."""

    def settle(self) -> None:
        """Return when the calls that routines make in the background are made; raise `CopyError` if one was refused."""


class Device(Protocol):
    """Issues the work that the engine needs of a device.

    Calls come from the thread that runs the model or its backward, one at a time. Calls that release a buffer may also
    come from any thread in which the garbage collector runs, including the device's own. Time may be marked and
    read from any thread at any time.
    """

    torch_device: torch.device
    """Only saved tensors on this device are moved."""

    host_alignment: int
    """Every `HostRegion.offset` and slab size is a multiple of this many bytes (a power of two)."""

    memory: MemoryGauge | None
    """Measures the memory of the device; None: it cannot be measured."""

    graphs: DeviceGraphs | None
    """Knows about captures of CUDA graphs; None: the device has none."""

    busy_ratio: float
    """How much longer compute takes where it never waits for copies, as far as that is known before it is measured: a
    device that idles less clocks lower. See `Costs.busy_ratio`."""

    def new_stream(self, name: str) -> Stream:
        """Make a copy stream: a queue whose work runs in the order of issue, concurrently with the compute stream."""

    def current_stream(self) -> Stream:
        """Return the compute stream on which the caller's work is queued now."""

    def record_event(self, stream: Stream) -> Event:
        """Return an event that completes when all work issued to `stream` so far has completed."""

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Make work issued to `stream` from now on wait for `event`. Never blocks a host that runs ahead of it.

        Raises:
            CopyError: if the work that `event` stands for is already known to have failed.
        """

    def wait_stream(self, stream: Stream, leader: Stream) -> None:
        """Make work issued to `stream` from now on wait for all work issued to `leader` so far.

        The same as `wait_event(stream, record_event(leader))`, in one call.
        """

    def is_copy_thread(self) -> bool:
        """Return whether this is a thread that copies, in which waiting for a copy might deadlock."""

    def is_complete(self, event: Event) -> bool:
        """Return whether `event` has completed without error; never blocks, never raises.

        For failed work the answer is always False: `wait_event` and `synchronize` raise its error.
        """

    def synchronize(self, event: Event) -> None:
        """Block the host until `event` has completed.

        Raises:
            CopyError: if the work that `event` stands for failed.
        """

    def mark_time(self, stream: Stream) -> TimeMark:
        """Mark the moment at which all work issued to `stream` so far has completed. For recordings only.

        Orders nothing, and neither takes nor raises the failure of a copy.
        """

    def milliseconds_between(self, first: TimeMark, last: TimeMark) -> float:
        """Return the time from one mark to another, of any two streams; negative if `last` came earlier.

        Blocks the host until both moments have come.

        Raises:
            CopyError: if the device has failed.
        """

    def allocate(self, nbytes: int, stream: Stream, spec: TensorSpec | None = None) -> torch.Tensor:
        """Allocate a device tensor from the memory pool of the compute stream `stream`, uninitialized.

        The tensor is 1-D uint8, or of `spec`, which must cover exactly these `nbytes` bytes.

        Work already issued to `stream` may still be using these bytes: a copy into them waits for an event that is
        recorded on `stream` after this call.
        """

    def empty(self, storage: torch.UntypedStorage) -> None:
        """Release the bytes of `storage` to the pool they came from, although tensors still hold it.

        A read of such a tensor before `restore` crashes the process.
        """

    def restore(self, storage: torch.UntypedStorage, nbytes: int, stream: Stream) -> torch.Tensor:
        """Allocate bytes for a storage that was emptied, for every tensor that holds it."""

    def copy_out(self, stream: Stream, copies: list[tuple[torch.Tensor, HostRegion]]) -> Event:
        """Issue the device-to-host copies of whole storages on `stream`, in any order.

        A tensor stands for its storage here, whatever its shape and dtype. The caller keeps it alive, and unchanged,
        until the returned event has completed.

        Args:
            stream: from `new_stream`.
            copies: source and target of each.

        Returns:
            The event after the last byte, and after all earlier work of `stream`.

        Raises:
            ValueError: if a target has another size than its source, or is not inside its slab; nothing is issued.
        """

    def copy_in(self, stream: Stream, copies: list[tuple[HostRegion, torch.Tensor]]) -> Event:
        """Issue the host-to-device copies into whole storages on `stream`; see `copy_out`."""

    def host_read(self, tensor: torch.Tensor) -> HostRead:
        """Start reading a small device tensor (up to 8 KiB), such as split sizes, on the current stream.

        Unlike `.cpu()`, this does not queue behind copies of activations in flight. Larger tensors are read by
        `.cpu()`, at once. The result may be pinned: if it is copied to a device without blocking, on a stream other
        than that of the next read, keep a reference until the copy is over.

        Returns:
            A handle: `wait()` returns the tensor on the CPU; `tensor` is valid once the stream has reached the read.
        """

    def free_host_bytes(self) -> int:
        """Return the bytes that this process may still take of the host tier.

        If a launcher has started several processes on this node, each has an equal share of the free bytes and of those
        that the processes hold.
        """

    def new_slab(self, nbytes: int) -> HostSlab:
        """Allocate host-tier bytes (`nbytes` is a multiple of `host_alignment`).

        Raises:
            MemoryError: if the host tier has no room for them.
        """

    def close(self) -> None:
        """Finish all issued copies, stop worker threads, and remove files. Idempotent."""

    def abandon(self) -> None:
        """Do not close when the process ends: what was issued may never finish, as other processes have failed."""
