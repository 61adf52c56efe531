# SPDX-License-Identifier: Apache-2.0
"""Measures how fast a device copies, both ways at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from offload_engine._devices.base import Device, HostRegion, Stream, TimeMark
from offload_engine.planning.clocks import Link

_NUM_COPIES: Final = 6
"""In each direction."""


def measure_link(
    device: Device, streams: Sequence[Stream], nbytes: int, start: Callable[[], None] = lambda: None
) -> Link:
    """Copy out and in at once, for about ten milliseconds, and return the bandwidths.

    Args:
        device: must be between two steps.
        streams: the streams for copy-outs and for copy-ins, with nothing in flight.
        nbytes: size of each copy.
        start: called right before; with several processes on one host, they wait for each other here.
    """
    nbytes = -(-nbytes // device.host_alignment) * device.host_alignment
    compute = device.current_stream()
    slab = device.new_slab(2 * nbytes)
    try:
        buffers = [device.allocate(nbytes, compute) for _ in streams]
        regions = [HostRegion(slab, index * nbytes, nbytes) for index in range(2)]
        for stream in streams:
            device.wait_stream(stream, compute)
        device.synchronize(device.copy_out(streams[0], list(zip(buffers, regions, strict=True))))  # as pages exist
        start()
        marks = _copy(device, streams, buffers, regions)
        milliseconds = [device.milliseconds_between(first, last) for first, last in marks]
    finally:
        for stream in streams:
            device.wait_stream(compute, stream)
            device.synchronize(device.record_event(stream))
        slab.close()
    return Link(*(_NUM_COPIES * nbytes / 1e6 / max(each, 1e-6) for each in milliseconds))


def _copy(
    device: Device, streams: Sequence[Stream], buffers: Sequence[torch.Tensor], regions: Sequence[HostRegion]
) -> list[tuple[TimeMark, TimeMark]]:
    """Copy, and return the time marks around all copies except the first of each direction."""
    marks: list[list[TimeMark]] = []
    for _ in range(1 + _NUM_COPIES):
        device.copy_out(streams[0], [(buffers[0], regions[0])])
        device.copy_in(streams[1], [(regions[1], buffers[1])])
        marks.append([device.mark_time(stream) for stream in streams])
    return list(zip(marks[0], marks[-1], strict=True))
