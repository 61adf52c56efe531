"""`Reactive`: what the policies have in common that decide at each boundary by what they see."""

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
    BoundaryKind,
)
from offload_engine.schedule import Action


class Reactive(Policy):
    """Copies each group out at its commit, and in again in the order of backward, as far ahead as the horizon allows.

    Correctness never depends on a copy-in: what unpack misses is copied in then, and counted.
    """

    brings_only_last_layer: bool = False
    """Of a chunk whose backward has not begun, whether the groups of its last layer alone come back, and behind a tail
    those of a layer only once the backward is a layer ahead of it."""

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
            return self._copy_ins_ahead()
        if chunk is not None:
            if kind is FORWARD:
                return self._begin_forward(chunk)
            if kind is LOSS_DONE:
                self._window.begin_backward(chunk)
                return self._copy_ins_ahead()
            if kind is FORWARD_END:
                chunk.end_forward()
        return ()

    def _begin_forward(self, chunk: ChunkProgress) -> Iterator[Move]:
        if self._window.begin_forward(chunk):
            self._horizon.count_passed()
        while (ahead := self._next_ahead()) is not None:
            yield Move(IN, ahead)

    def _commit(self, chunk: ChunkProgress, group: TensorGroup) -> Iterator[Move]:
        self._horizon.count_committed(group)
        if not group.is_kept:
            yield Move(OUT, group)
        while (ahead := self._next_ahead()) is not None:
            yield Move(IN, ahead)

    def _begin_backward(self, chunk: ChunkProgress, group: TensorGroup | None) -> Iterator[Move]:
        self._window.begin_backward(chunk)
        if group is not None:
            chunk.backward_index = min(chunk.backward_index, group.index)
            self._horizon.count_reached(group)
            # Overtaken: everything down to this group is late, and is issued in one go.
            while chunk.prefetch_index >= group.index:
                late = chunk.groups[chunk.prefetch_index]
                chunk.prefetch_index -= 1
                if late.on_host_bytes and (late is group or self._horizon.may_issue_late(late)):
                    yield Move(IN, late)
        while (ahead := self._next_ahead()) is not None:
            yield Move(IN, ahead)

    def _copy_ins_ahead(self) -> Iterator[Move]:
        while (ahead := self._next_ahead()) is not None:
            yield Move(IN, ahead)

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
        """Return whether `group`, the next of `chunk`, may come back now, if there is room."""
        if chunk is not self._window.backward_chunk:
            if not self._window.has_schedule:  # that backward may never come
                return chunk.prefetch_index == len(chunk.groups) - 1
            return not self.brings_only_last_layer or chunk.is_in_last_layer(group)
        # Where the last layer is used memory has its peak, and what a loss has just freed is for the weight gradients
        # of the tail, which would find it in pieces; the groups of the layer before have the whole of that backward to
        # come back. What never left needs no memory to come back into.
        return (
            not self.brings_only_last_layer
            or not group.on_host_bytes
            or chunk.is_near(group)
            or chunk.is_in_last_layer(group)
        )
