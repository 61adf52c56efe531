# SPDX-License-Identifier: Apache-2.0
"""`Replays`: issues the copies of a program around the replays of its graphs."""

from __future__ import annotations

from collections.abc import Sequence

from offload_engine._captured.program import Step
from offload_engine._devices.base import Event
from offload_engine._saved.transfers import TransferContext
from offload_engine.errors import OffloadError


class Replays:
    """Runs a program once in each pass through its graphs.

    The numbers are those of the rules of order in `_saved/transfers.py`. Rules 2, 6 and 7 need no wait of their own: a
    graph is replayed behind all that was read before it, so host bytes and slots that an earlier graph has used are
    free once the copies of this one may begin.

    Args:
        steps: of the graphs, in their order.
        context: device and copy streams.
    """

    def __init__(self, steps: Sequence[Step], context: TransferContext) -> None:
        graphs = context.device.graphs
        assert graphs is not None
        self._steps = steps
        self._context = context
        # Prepared once: a replay leaves the host no more to do than CUDA's calls.
        self._issue_out = [graphs.prepare_copy_out(step.copy_outs) if step.copy_outs else None for step in steps]
        self._issue_in = [[graphs.prepare_copy_in(copy_in.copies) for copy_in in step.copy_ins] for step in steps]
        self._next = 0
        self._copied_out: dict[int, Event] = {}
        self._copied_in: dict[int, Event] = {}

    def before(self, number: int) -> None:
        """Call it before a replay, on the stream of the replay. Again where that replay has raised an error.

        Raises:
            OffloadError: if this graph is not the next one of the captures, nor the first.
        """
        if number not in (0, self._next):
            raise OffloadError(
                f"CUDA graph {number} is replayed where graph {self._next} was captured: with offload, graphs are "
                "replayed in the order of their captures, because they use each other's memory"
            )
        device = self._context.device
        stream = device.current_stream()
        if number == 0:
            self._begin()
        step = self._steps[number]
        for saved_by in step.left:
            device.wait_event(stream, self._copied_out[saved_by])  # Rule 3
        if step.reads:
            device.wait_event(stream, self._copied_in[number])  # Rule 5

    def after(self, number: int) -> None:
        """Call it behind a replay, on its stream. If it is broken off, only a new pass may follow."""
        device, out, into = self._context.device, self._context.copy_out_stream, self._context.copy_in_stream
        step = self._steps[number]
        self._next = 0  # until all copies are issued: some may write what this graph has read
        for number_out in step.left:
            del self._copied_out[number_out]
        self._copied_in.pop(number, None)
        issue_out = self._issue_out[number]
        if issue_out is not None:
            device.wait_stream(out, device.current_stream())  # Rule 1
            self._copied_out[number] = issue_out(out)
        if step.copy_ins:
            device.wait_stream(into, device.current_stream())  # Rule 4
        for copy_in, issue_in in zip(step.copy_ins, self._issue_in[number], strict=True):
            for number_out in copy_in.saved_by:
                device.wait_event(into, self._copied_out[number_out])  # Rule 3, which compute waits for later
            self._copied_in[copy_in.number] = issue_in(into)
        self._next = (number + 1) % len(self._steps)

    def _begin(self) -> None:
        """Have compute wait for copy-ins that a pass which was broken off has left in flight.

        Its copy-outs may read what this pass writes: the copy-outs of this pass follow them, to the same host bytes.
        """
        device = self._context.device
        self._next = 0
        for event in self._copied_in.values():
            device.wait_event(device.current_stream(), event)
        self._copied_in.clear()
        self._copied_out.clear()
