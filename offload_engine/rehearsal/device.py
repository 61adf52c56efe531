# SPDX-License-Identifier: Apache-2.0
"""`RehearsalDevice`: a device on which kernels and copies only advance clocks, and bytes are only counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from offload_engine._devices.base import (
    DeviceGraphs,
    HostRead,
    HostRegion,
    HostSlab,
    MemoryGauge,
    PlainRead,
    TensorSpec,
)
from offload_engine._devices.regions import new_buffer, whole
from offload_engine.planning.clocks import Clocks, Link
from offload_engine.rehearsal.allocated import AllocatedBytes

_COMPUTE: Final = "compute"
_MOST_STEPS: Final = 3
_HOST_BYTES: Final = 1 << 50
"""No limit, because the point is how much a step takes."""


class _Event:
    """The time at which it completes."""

    def __init__(self, at: float) -> None:
        self.at = at


class _Slab:
    """Host bytes that are only counted."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def close(self) -> None: ...


class StepClocks:
    """Keeps the clocks of one step: of compute, and of the two copy streams.

    Args:
        link: how fast copies are.

    Attributes:
        now: the clocks.
        copied: time until which each copy stream copies or waits, in ms.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.begin_step()

    def begin_step(self) -> None:
        """Set all clocks to zero; call it between steps."""
        self.now = Clocks(self._link)
        self.copied = {"copy_out": 0.0, "copy_in": 0.0}

    def run(self, milliseconds: float, name: str) -> None:
        """Launch a kernel."""
        self.now.run(milliseconds, name)


def steps_until_steady(allocated: AllocatedBytes, clocks: StepClocks) -> Iterator[None]:
    """Begin up to three steps, of which the last counts, with what making the model took returned.

    The policy learns sizes in the first, and the allocator has the segments of the second. If that has reserved none, a
    third would be the same. An arena is reserved before the second, as a budget does before steps that are planned.
    """
    allocated.segments.trim()
    for number in range(_MOST_STEPS):
        reserved = allocated.segments.reserved_bytes
        if number == 1:
            allocated.reserve_arena()
        allocated.reset_peak()
        clocks.begin_step()
        yield
        if number and allocated.segments.reserved_bytes == reserved:
            return


class RehearsalDevice:
    """Simulates a GPU that computes nothing: its streams are clocks. See `Device`.

    Args:
        clocks: clocks of its streams.
        allocated: counts what it allocates.
    """

    torch_device = torch.device("cpu")
    host_alignment = 512
    memory: MemoryGauge | None = None
    graphs: DeviceGraphs | None = None
    busy_ratio = 1.0

    def __init__(self, clocks: StepClocks, allocated: AllocatedBytes) -> None:
        self.clocks = clocks
        self.allocated = allocated

    def new_stream(self, name: str) -> str:
        return name

    def current_stream(self) -> str:
        return _COMPUTE

    def record_event(self, stream: str) -> _Event:
        return _Event(self.clocks.now.compute if stream == _COMPUTE else self.clocks.copied[stream])

    def wait_event(self, stream: str, event: _Event) -> None:
        if stream == _COMPUTE:
            self.clocks.now.wait(event.at, "")
        else:
            self.clocks.copied[stream] = max(self.clocks.copied[stream], event.at)

    def wait_stream(self, stream: str, leader: str) -> None:
        self.wait_event(stream, self.record_event(leader))

    def is_copy_thread(self) -> bool:
        return False

    def is_complete(self, event: _Event) -> bool:
        return self.clocks.now.is_over(event.at)

    def synchronize(self, event: _Event) -> None:
        self.clocks.now.host = max(self.clocks.now.host, event.at)

    def mark_time(self, stream: str) -> _Event:
        return self.record_event(stream)

    def milliseconds_between(self, first: _Event, last: _Event) -> float:
        return last.at - first.at

    def allocate(self, nbytes: int, stream: str, spec: TensorSpec | None = None) -> torch.Tensor:
        return new_buffer(nbytes, spec, self.torch_device)

    def empty(self, storage: torch.UntypedStorage) -> None:
        storage.resize_(0)
        self.allocated.note(storage)

    def restore(self, storage: torch.UntypedStorage, nbytes: int, stream: str) -> torch.Tensor:
        storage.resize_(nbytes)
        self.allocated.note(storage)
        return whole(storage)

    def copy_out(self, stream: str, copies: Sequence[tuple[torch.Tensor, HostRegion]]) -> _Event:
        nbytes = sum(region.nbytes for _, region in copies)
        self.clocks.copied[stream] = self.clocks.now.copy_out(nbytes, self.clocks.copied[stream], "")
        return self.record_event(stream)

    def copy_in(self, stream: str, copies: Sequence[tuple[HostRegion, torch.Tensor]]) -> _Event:
        nbytes = sum(region.nbytes for region, _ in copies)
        self.clocks.copied[stream] = self.clocks.now.copy_in(nbytes, "")
        return self.record_event(stream)

    def host_read(self, tensor: torch.Tensor) -> HostRead:
        return PlainRead(tensor)

    def free_host_bytes(self) -> int:
        return _HOST_BYTES

    def new_slab(self, nbytes: int) -> HostSlab:
        return _Slab(nbytes)

    def close(self) -> None: ...

    def abandon(self) -> None: ...
