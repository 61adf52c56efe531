# SPDX-License-Identifier: Apache-2.0
"""`Replays`: issues the copies of a program around the replays of its graphs."""

from __future__ import annotations

from collections.abc import Sequence

from offload_engine._captured.program import Step
from offload_engine._devices.base import COMPUTE, DeviceGraphs, Event, Routine
from offload_engine._saved.transfers import TransferContext
from offload_engine.errors import OffloadError


class Replays:
    """Runs a program once in each pass through its graphs.

    All calls are noted once: a replay leaves the host no more to do than two routines, one in front of it and one
    behind it.

    Args:
        steps: of the graphs, in their order.
        context: device and copy streams.
    """

    def __init__(self, steps: Sequence[Step], context: TransferContext) -> None:
        self._context = context
        self._current_stream = context.device.current_stream
        notes = _Notes(context)
        self._routines = [(notes.before(number, step), notes.after(number, step)) for number, step in enumerate(steps)]
        self._next = 0
        self._is_under_way = False  # a pass has begun, and the copies behind its last graph are not issued

    def before(self, number: int) -> None:
        """Call it before a replay, on the stream of the replay. Again where that replay has raised an error.

        Raises:
            OffloadError: if this graph is not the next one of the captures, nor the first.
        """
        if number == 0:
            self._begin()
        elif number != self._next:
            raise OffloadError(
                f"CUDA graph {number} is replayed where graph {self._next} was captured: with offload, graphs are "
                "replayed in the order of their captures, because they use each other's memory"
            )
        routine = self._routines[number][0]
        if routine is not None:
            routine.run(self._current_stream())

    def after(self, number: int) -> None:
        """Call it behind a replay, on its stream. If it is broken off, only a new pass may follow."""
        self._next = 0  # until all copies are issued: some may write what this graph has read
        routine = self._routines[number][1]
        if routine is not None:
            routine.run(self._current_stream())
        if number + 1 < len(self._routines):
            self._next = number + 1
        else:
            self._is_under_way = False

    def _begin(self) -> None:
        """Have compute wait for copy-ins that a pass which was broken off has left in flight.

        Its copy-outs may read what this pass writes: the copy-outs of this pass follow them, to the same host bytes.
        """
        self._next = 0
        if self._is_under_way:
            self._context.device.wait_stream(self._current_stream(), self._context.copy_in_stream)
        self._is_under_way = True


class _Notes:
    """Notes the calls of all replays, from the first graph to the last.

    The numbers are those of the rules of order in `_saved/transfers.py`. Rules 2, 6 and 7 need no wait of their own: a
    graph is replayed behind all that was read before it, so host bytes and slots that an earlier graph has used are
    free once the copies of this one may begin.
    """

    def __init__(self, context: TransferContext) -> None:
        assert context.device.graphs is not None
        self._graphs: DeviceGraphs = context.device.graphs
        self._out, self._into = context.copy_out_stream, context.copy_in_stream
        self._copied_out: dict[int, Event] = {}  # by the graph that has saved
        self._copied_in: dict[int, Event] = {}  # by the graph that reads

    def before(self, number: int, step: Step) -> Routine | None:
        """Return what comes in front of a replay, if anything."""
        if not (step.left or step.reads):
            return None
        calls = self._graphs.new_routine()
        for saved_by in step.left:
            calls.wait_event(COMPUTE, self._copied_out[saved_by])  # Rule 3
        if step.reads:
            calls.wait_event(COMPUTE, self._copied_in[number])  # Rule 5
        return calls

    def after(self, number: int, step: Step) -> Routine | None:
        """Return what comes behind a replay, if anything."""
        if not (step.copy_outs or step.copy_ins):
            return None
        calls = self._graphs.new_routine()
        replayed = calls.record_event(COMPUTE)
        if step.copy_outs:
            calls.wait_event(self._out, replayed)  # Rule 1
            self._copied_out[number] = calls.copy_out(self._out, step.copy_outs)
        if step.copy_ins:
            calls.wait_event(self._into, replayed)  # Rule 4
        for copy_in in step.copy_ins:
            for saved_by in copy_in.saved_by:
                calls.wait_event(self._into, self._copied_out[saved_by])  # Rule 3, which compute waits for later
            self._copied_in[copy_in.number] = calls.copy_in(self._into, copy_in.copies)
        return calls
