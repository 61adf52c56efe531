# SPDX-License-Identifier: Apache-2.0
"""`CudaRoutine`: records calls of the CUDA runtime once, to make them again and again by one call of C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from offload_engine._devices.cuda_calls import BACKGROUND, COPY, OTHER_DEVICE, RECORD, WAIT
from offload_engine._devices.cuda_runtime import (
    DEFAULT_STREAM,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    CudaEvent,
    CudaRuntime,
    addresses_in,
    addresses_out,
)
from offload_engine._devices.regions import HostRegion


class CudaRoutine:
    """Implements `Routine` on the device of a runtime.

    An event is one of CUDA's, recorded again in each run: a CUDA wait refers to the last record issued before it.
    """

    def __init__(self, runtime: CudaRuntime, device: torch.device) -> None:
        self._runtime = runtime
        self._device = device
        self._numbers: list[int] = []
        self._events: list[CudaEvent] = []  # whose handles are among the numbers

    def record_event(self, stream: int) -> CudaEvent:
        """See `Routine.record_event`."""
        event = self._new_event()
        self._numbers += (RECORD, stream, event.handle)
        return event

    def wait_event(self, stream: int, event: CudaEvent) -> None:
        """See `Routine.wait_event`."""
        self._events.append(event)
        self._numbers += (WAIT, stream, event.handle)

    def copy_out(self, stream: int, copies: list[tuple[torch.Tensor, HostRegion]]) -> CudaEvent:
        """As `Routine.copy_out`."""
        return self._copy(stream, DEVICE_TO_HOST, addresses_out(copies))

    def copy_in(self, stream: int, copies: list[tuple[HostRegion, torch.Tensor]]) -> CudaEvent:
        """As `Routine.copy_in`."""
        return self._copy(stream, HOST_TO_DEVICE, addresses_in(copies))

    def in_background(self) -> None:
        """See `Routine.in_background`."""
        self._numbers.append(BACKGROUND)

    def finish(self) -> Callable[[int], None]:
        """As `Routine.finish`. Where all goes well, it is one call of C."""
        run: Callable[[int], None] = self._runtime.calls.routine(
            self._numbers, self._device.index, self._run_elsewhere
        ).run
        return run

    def _run_elsewhere(self, routine: Any, code: int) -> None:
        """Run the routine with its device current, on the default stream of that; raise the error of another code."""
        if code != OTHER_DEVICE:
            self._runtime.check(code)
        with torch.cuda.device(self._device):
            routine.run(DEFAULT_STREAM)

    def _copy(self, stream: int, kind: int, addresses: list[int]) -> CudaEvent:
        event = self._new_event()
        self._numbers += (COPY, stream, event.handle, kind, len(addresses) // 3)
        self._numbers += addresses[0::3] + addresses[1::3] + addresses[2::3]
        return event

    def _new_event(self) -> CudaEvent:
        event = self._runtime.unrecorded()
        self._events.append(event)
        return event
