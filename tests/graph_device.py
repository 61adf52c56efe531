# SPDX-License-Identifier: Apache-2.0
"""`GraphDevice`: an adversarial device whose streams may be captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from offload_engine._devices.base import HostRegion, Routine
from tests.adversarial import AdversarialDevice, AdversarialEvent, AdversarialSlab, AdversarialStream


class GraphDevice(AdversarialDevice):
    """Knows of each stream and event whether a capture has it, and notes as a hazard what CUDA refuses there.

    A wait must not cross the edge of a capture, and at its end the capturing stream must have waited for all others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.graphs = self
        self.is_recording = False
        self.is_settled = True  # all calls in the background are made: here at once, which is one of the possible times
        self.captures = 0  # the number of the running one; 0: none
        self._num_captures = 0
        self._captured: dict[AdversarialStream, int] = {}  # the number of calls of each in the running capture
        self._joined: dict[AdversarialStream, int] = {}  # how many of them the capturing stream has waited for
        # By id: the capture, the number of calls before it, and the event itself, so that no other has its id.
        self._events: dict[int, tuple[int, int, AdversarialEvent]] = {}

    @contextmanager
    def graph(self) -> Iterator[None]:
        """Do what `torch.cuda.graph` does around the code that it captures."""
        self._num_captures += 1
        self.captures = self._num_captures
        self._captured[self._current] = 0
        try:
            yield
        finally:
            for stream, calls in self._captured.items():
                if stream is not self._current and self._joined.get(stream) != calls:
                    self.hazards.append(f"{stream} was not joined")
            self.captures = 0
            self._captured.clear()
            self._joined.clear()

    def is_capturing(self) -> bool:
        return self.captures > 0

    def record(self, is_recording: bool) -> None:
        for stream in self._streams if is_recording else ():
            if self._host_clock.get(stream.index, 0) < stream.now:
                self.hazards.append(f"{stream} is not known to be idle when the capture is announced")
        self.is_recording = is_recording

    def record_event(self, stream: AdversarialStream) -> AdversarialEvent:
        return self._noted(super().record_event(stream), stream)

    def wait_event(self, stream: AdversarialStream, event: AdversarialEvent) -> None:
        of, calls, _ = self._events[id(event)]
        if of and of == self.captures:
            self._captured[stream] = self._captured.get(stream, 0) + 1
            if stream is self._current:
                self._joined[event.stream] = max(calls, self._joined.get(event.stream, 0))
        elif of or stream in self._captured:
            self.hazards.append(f"{stream} waits across the edge of a capture")
        super().wait_event(stream, event)

    def is_complete(self, event: AdversarialEvent) -> bool:
        self._check_recording()
        return not self.is_recording and super().is_complete(event)

    def synchronize(self, event: AdversarialEvent) -> None:
        self._check_recording()
        if not self.is_recording:
            super().synchronize(event)

    def copy_out(
        self, stream: AdversarialStream, copies: Sequence[tuple[torch.Tensor, HostRegion]]
    ) -> AdversarialEvent:
        self._begin_copy(stream)
        return self._noted(super().copy_out(stream, copies), stream)

    def copy_in(self, stream: AdversarialStream, copies: Sequence[tuple[HostRegion, torch.Tensor]]) -> AdversarialEvent:
        self._begin_copy(stream)
        return self._noted(super().copy_in(stream, copies), stream)

    def new_routine(self) -> Routine:
        return GraphRoutine(self)

    def settle(self) -> None:
        self.is_settled = True

    def new_slab(self, nbytes: int) -> AdversarialSlab:
        assert not self.captures, "nothing can be pinned in a capture"
        return super().new_slab(nbytes)

    def _close_slab(self, slab: AdversarialSlab) -> None:
        assert not self.captures, "nothing can be unpinned in a capture"
        super()._close_slab(slab)

    def _begin_copy(self, stream: AdversarialStream) -> None:
        if stream in self._captured:
            self._captured[stream] += 1
        elif self.captures:
            self.hazards.append(f"{stream} copies outside of the capture")

    def _check_recording(self) -> None:
        if self.captures and not self.is_recording:
            self.hazards.append("an event is asked for in a capture")

    def _noted(self, event: AdversarialEvent, stream: AdversarialStream) -> AdversarialEvent:
        of = self.captures if stream in self._captured else 0
        self._events[id(event)] = of, self._captured.get(stream, 0), event
        return event


class RoutineEvent:
    """The event of a routine's last run."""

    def __init__(self) -> None:
        self.last: AdversarialEvent | None = None


class GraphRoutine:
    """Makes its calls of the device one by one."""

    def __init__(self, device: GraphDevice) -> None:
        self._device = device
        self._calls: list[Callable[[AdversarialStream], None]] = []
        self._is_behind = False  # what is added may be made in the background

    def record_event(self, stream: AdversarialStream) -> RoutineEvent:
        return self._note(lambda compute: self._device.record_event(stream or compute))

    def wait_event(self, stream: AdversarialStream, event: RoutineEvent) -> None:
        def call(compute: AdversarialStream) -> None:
            assert event.last is not None, "a wait for what was never recorded"
            self._device.wait_event(stream or compute, event.last)

        self._calls.append(call)

    def copy_out(self, stream: AdversarialStream, copies: list[tuple[torch.Tensor, HostRegion]]) -> RoutineEvent:
        assert self._is_behind, "the host is not to wait for copies"
        return self._note(lambda _: self._device.copy_out(stream, copies))

    def copy_in(self, stream: AdversarialStream, copies: list[tuple[HostRegion, torch.Tensor]]) -> RoutineEvent:
        assert self._is_behind, "the host is not to wait for copies"
        return self._note(lambda _: self._device.copy_in(stream, copies))

    def in_background(self) -> None:
        self._is_behind = True

    def finish(self) -> Callable[[AdversarialStream], None]:
        return self.run

    def run(self, compute: AdversarialStream) -> None:
        self._device.is_settled &= not self._is_behind
        for call in self._calls:
            call(compute)

    def _note(self, record: Callable[[AdversarialStream], AdversarialEvent]) -> RoutineEvent:
        event = RoutineEvent()

        def call(compute: AdversarialStream) -> None:
            event.last = record(compute)

        self._calls.append(call)
        return event


class GraphWithoutReplay:
    """Stands in for `torch.cuda.CUDAGraph` where nothing replays it."""

    def capture_begin(self) -> None: ...

    def capture_end(self) -> None: ...

    def reset(self) -> None: ...
