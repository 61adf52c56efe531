# SPDX-License-Identifier: Apache-2.0
"""`Replays`: issues the copies of a program around the replays of its graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offload_engine._captured.program import Step
from offload_engine._devices.base import COMPUTE, DeviceGraphs, Event, Stream
from offload_engine._saved.transfers import TransferContext
from offload_engine.errors import OffloadError

Run = Callable[[Stream], None]
"""Makes the calls before or after a replay, on the stream of the replay."""


class Replays:
    """Runs a program once in each pass through its graphs.

    All calls are recorded once. Around each replay the host only calls two functions that make them.

    Args:
        steps: waits and copies of the graphs, in their order.
        context: device and copy streams.
    """

    def __init__(self, steps: Sequence[Step], context: TransferContext) -> None:
        self._context = context
        self._current_stream = context.device.current_stream
        self._compute: Stream = None  # of the replay under way, so that it is asked for once
        notes = _Notes(context)
        self._settle = notes.graphs.settle
        self._before: list[Run | None] = []
        self._after: list[Run | None] = []
        for number, step in enumerate(steps):
            self._before.append(notes.before(number, step))
            self._after.append(notes.after(number, step))
        self._next = 0
        self._is_under_way = False  # a pass has begun, and the copies after its last graph are not issued

    def before(self, number: int) -> None:
        """Issue what a replay waits for, on its stream. May be called again if that replay raised an error.

        Raises:
            OffloadError: if this graph is neither the next one in the order of the captures nor the first.
        """
        self._compute = self._current_stream()
        if number == 0:
            self._begin()
        elif number != self._next:
            raise OffloadError(
                f"CUDA graph {number} is replayed where graph {self._next} was captured: with offload, replay them "
                "in the order of their captures, because they use each other's memory"
            )
        run = self._before[number]
        if run is not None:
            run(self._compute)

    def after(self, number: int) -> None:
        """Issue the copies after a replay, on the stream of `before`. If interrupted, only a new pass may follow."""
        self._next = 0  # until all copies are issued: some may overwrite what this graph has read
        run = self._after[number]
        if run is not None:
            run(self._compute)
        if number + 1 < len(self._after):
            self._next = number + 1
        else:
            self._settle()  # the memory of the graphs may be returned from now on
            self._is_under_way = False

    def _begin(self) -> None:
        """Make compute wait for copy-ins that an interrupted pass has left in flight.

        Its copy-outs may read what this pass writes, but the copy-outs of this pass then overwrite the same host bytes.
        """
        self._next = 0
        if self._is_under_way:
            self._context.device.wait_stream(self._compute, self._context.copy_in_stream)
        self._is_under_way = True


class _Notes:
    """Records the calls of all replays, from the first graph to the last.

    Numbers refer to the rules of order in `_saved/transfers.py`. Rules 2, 6 and 7 need no wait of their own: a graph is
    replayed after all earlier reads, so host bytes and slots that an earlier graph used are free when its copies begin.
    """

    def __init__(self, context: TransferContext) -> None:
        assert context.device.graphs is not None
        self.graphs: DeviceGraphs = context.device.graphs
        self._out, self._into = context.copy_out_stream, context.copy_in_stream
        self._copied_out: dict[int, Event] = {}  # by the graph that has saved
        self._copied_in: dict[int, Event] = {}  # by the graph that reads

    def before(self, number: int, step: Step) -> Run | None:
        """Return what to call before a replay; None if it would make no call."""
        if not (step.left or step.reads):
            return None
        calls = self.graphs.new_routine()
        for saved_by in step.left:
            calls.wait_event(COMPUTE, self._copied_out[saved_by])  # Rule 3
        if step.reads:
            calls.wait_event(COMPUTE, self._copied_in[number])  # Rule 5
        return calls.finish()

    def after(self, number: int, step: Step) -> Run | None:
        """Return what to call after a replay; None if it would make no call."""
        if not (step.copy_outs or step.copy_ins):
            return None
        calls = self.graphs.new_routine()
        replayed = calls.record_event(COMPUTE)
        calls.in_background()
        if step.copy_outs:
            calls.wait_event(self._out, replayed)  # Rule 1
            self._copied_out[number] = calls.copy_out(self._out, step.copy_outs)
        if step.copy_ins:
            calls.wait_event(self._into, replayed)  # Rule 4
        for copy_in in step.copy_ins:
            for saved_by in copy_in.saved_by:
                calls.wait_event(self._into, self._copied_out[saved_by])  # Rule 3; compute itself waits later
            self._copied_in[copy_in.number] = calls.copy_in(self._into, copy_in.copies)
        return calls.finish()
