# SPDX-License-Identifier: Apache-2.0
"""`Reactive`: base of the policies that decide at each boundary by the current state, without a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from offload_engine._chunk.progress import ChunkProgress
from offload_engine._policy.horizon import Horizon
from offload_engine._policy.leaving import LeavingQueue
from offload_engine._policy.policy import Move, Policy
from offload_engine._policy.window import BackwardWindow
from offload_engine._saved.counters import ByteCounters
from offload_engine._saved.storage import TensorGroup
from offload_engine.planning.moves import (
    BACKWARD,
    BACKWARD_END,
    COMMIT,
    FORWARD,
    FORWARD_END,
    IN,
    LOSS_DONE,
    OUT,
    UNKEEP,
    BoundaryKind,
)
from offload_engine.schedule import Action


class Reactive(Policy):
    """Copies each group out at its commit, and in as far ahead of the backward as the horizon allows.

    Correctness never depends on a copy-in: unpack copies in a missing storage itself, and counts it.
    """

    brings_only_last_layer: bool = False
    """Whether only the last layer of a chunk is copied in before its backward begins. If the forward had a tail, each
    further layer is then copied in only once the backward is one layer ahead of it."""

    def __init__(self, counters: ByteCounters, leaving: LeavingQueue, horizon: Horizon) -> None:
        super().__init__(counters, leaving)
        self._horizon = horizon
        self._window = BackwardWindow()

    def begin(self, actions: Sequence[Action], is_combined: bool) -> None:
        """See `Policy`."""
        self._horizon.clear()
        self._window.begin(actions, is_combined)

    def clear(self) -> None:
        """See `Policy`."""
        self._horizon.clear()
        self._window.clear()

    def at(self, kind: BoundaryKind, chunk: ChunkProgress | None, group: TensorGroup | None) -> Iterable[Move]:
        """See `Policy`."""
        if kind is BACKWARD:
            assert chunk is not None
            return self._begin_backward(chunk, group)
        if kind is COMMIT:
            assert chunk is not None and group is not None
            return self._commit(chunk, group)
        if kind is BACKWARD_END:
            return self._end_backward(chunk)
        if kind is UNKEEP and group is not None:
            return ((OUT, group),)
        if chunk is not None:
            if kind is FORWARD:
                return self._begin_forward(chunk)
            if kind is LOSS_DONE:
                self._window.begin_backward(chunk)
                return self._copy_ins_ahead()
            if kind is FORWARD_END:
                chunk.end_forward(self._window.is_combined)
        return ()

    def _begin_forward(self, chunk: ChunkProgress) -> Iterator[Move]:
        if self._window.begin_forward(chunk):
            self._horizon.count_passed()
        while (ahead := self._next_ahead()) is not None:
            yield IN, ahead

    def _commit(self, chunk: ChunkProgress, group: TensorGroup) -> Iterator[Move]:
        self._horizon.count_committed(group)
        if not group.is_kept:
            yield OUT, group
        while (ahead := self._next_ahead()) is not None:
            yield IN, ahead

    def _begin_backward(self, chunk: ChunkProgress, group: TensorGroup | None) -> Iterator[Move]:
        self._window.begin_backward(chunk)
        if group is not None:
            if group.index != chunk.tail_index or not chunk.awaits_tail:
                chunk.backward_index = min(chunk.backward_index, group.index)
            self._horizon.count_reached(group)
            # The backward has overtaken the prefetch: all groups down to this one are late, so issue them together.
            while chunk.prefetch_index >= group.index:
                late = chunk.groups[chunk.prefetch_index]
                chunk.prefetch_index -= 1
                if late.on_host_bytes and (late is group or self._horizon.may_issue_late(late)):
                    yield IN, late
        while (ahead := self._next_ahead()) is not None:
            yield IN, ahead

    def _end_backward(self, chunk: ChunkProgress | None) -> Iterable[Move]:
        if chunk is not None and chunk.has_tail_end and chunk.awaits_tail:
            chunk.end_tail()
        return self._copy_ins_ahead()

    def _copy_ins_ahead(self) -> Iterable[Move]:
        first = self._next_ahead()
        return () if first is None else self._copy_ins_from(first)

    def _copy_ins_from(self, first: TensorGroup) -> Iterator[Move]:
        yield IN, first
        while (ahead := self._next_ahead()) is not None:
            yield IN, ahead

    def _next_ahead(self) -> TensorGroup | None:
        """Return the next group to copy in, or to recall, within the horizon; count it as issued."""
        while (chunk := self._window.next_chunk()) is not None:
            group = chunk.groups[chunk.prefetch_index]
            if not self._may_come(chunk, group):
                return None
            if not self._horizon.has_room(group, self._window.backward_chunk is None):
                return None
            chunk.prefetch_index -= 1
            self._horizon.count_issued(group)
            if group.on_host_bytes or group.leaving_bytes:
                return group
        return None

    def _may_come(self, chunk: ChunkProgress, group: TensorGroup) -> bool:
        """Return whether `group`, the next of `chunk`, may be copied in now, if there is room."""
        if chunk is not self._window.backward_chunk:
            if not self._window.has_schedule:  # the predicted backward may never come
                return chunk.prefetch_index == len(chunk.groups) - 1
            return not self.brings_only_last_layer or chunk.is_in_last_layer(group)
        # Memory peaks while the last layer is used, and the bytes that the loss has just freed are for the weight
        # gradients of the tail: copy-ins would fragment them. The groups of the layer before can be copied in during
        # the whole backward of the last layer. A group that was not released needs no new memory.
        return (
            not self.brings_only_last_layer
            or not group.on_host_bytes
            or chunk.is_near(group)
            or chunk.is_in_last_layer(group)
        )
