# SPDX-License-Identifier: Apache-2.0
"""Implements the policies with a bound on resident bytes: `ResidentBudgetPolicy` and `ResidentLayersPolicy`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from offload_engine._chunk.progress import ChunkProgress
from offload_engine._policy.horizon import Horizon
from offload_engine._policy.leaving import LeavingQueue
from offload_engine._policy.policy import Move
from offload_engine._policy.reactive import Reactive
from offload_engine._saved.counters import ByteCounters
from offload_engine._saved.storage import TensorGroup
from offload_engine.planning.budget import SHARE_IN_FORWARD
from offload_engine.planning.moves import BACKWARD, DROP, FORWARD, IN, ITERATION_END, OUT, BoundaryKind
from offload_engine.schedule import Action, ChunkKey


class ResidentBudgetPolicy(Reactive):
    """Keeps as many saved bytes on the device as a budget has room for.

    A copy-out is released only if its room is needed. Groups that will still fit when a backward begins are not copied
    out; the bytes still to be saved are estimated from the last forward. Copying these groups would load the link, and
    a backward that has used one could reuse its memory only after a copy queued behind all the others. If more is saved
    than expected, the oldest of these groups are copied out late.
    """

    releases_completed = False

    def __init__(
        self,
        counters: ByteCounters,
        leaving: LeavingQueue,
        resident_bytes: int | None,
        expected_bytes: int | None = None,
    ) -> None:
        self._room = _Room(counters, resident_bytes)
        super().__init__(counters, leaving, self._room)
        self._expected_bytes = expected_bytes  # saved bytes, wherever, when the last backward began; None: unknown
        self._is_in_forward = False
        self._within_budget: deque[TensorGroup] = deque()  # not copied out, within the budget; oldest first

    def clear(self) -> None:
        """See `Policy`."""
        super().clear()
        self._is_in_forward = False
        self._within_budget.clear()

    def must_release(self) -> bool:
        """See `Policy`."""
        return not self._room.has(self.leaving.largest_bytes)

    def at(self, kind: BoundaryKind, chunk: ChunkProgress | None, group: TensorGroup | None) -> Iterable[Move]:
        """See `Policy`."""
        if kind is FORWARD:
            self._is_in_forward = True
        elif kind is BACKWARD:
            if self._is_in_forward:
                self._expected_bytes = self.counters.saved_bytes
                self._is_in_forward = False
            self._within_budget.clear()  # backward needs them now, so they are no longer copied out
        elif kind is ITERATION_END:
            return ((DROP, left) for left in self.leaving.groups)
        return super().at(kind, chunk, group)

    def _commit(self, chunk: ChunkProgress, group: TensorGroup) -> Iterator[Move]:
        if not group.is_kept and not self._may_stay(chunk, group):
            yield OUT, group
        while (ahead := self._next_ahead()) is not None:
            yield IN, ahead
        while self._within_budget and self.must_release():  # more was saved than expected
            yield OUT, self._within_budget.popleft()

    def _may_stay(self, chunk: ChunkProgress, group: TensorGroup) -> bool:
        """Return whether `group` fits together with all bytes still to be saved; if it does, it stays for now."""
        limit = self._room.limit_bytes
        if limit is None or self._expected_bytes is None:
            return False
        counters = self.counters
        to_come_bytes = max(0, self._expected_bytes - counters.saved_bytes)
        # If its backward is not next, a staying group would take room from groups that are copied out and in for other
        # chunks and needed earlier. So it stays only if all saved bytes fit.
        is_next = self._window.is_next(chunk)
        staying_bytes = counters.resident_bytes - self.leaving.inflight_bytes if is_next else counters.saved_bytes
        fits = staying_bytes + to_come_bytes + self.leaving.largest_bytes <= limit
        if not fits and not self._within_budget:  # otherwise an older group, needed later, is copied out instead
            return False
        self._within_budget.append(group)
        return True


class ResidentLayersPolicy(ResidentBudgetPolicy):
    """Has a budget of `num_layers` times the bytes of the largest layer so far.

    Bytes that a layer shares with an earlier layer, such as its input, are added on top: without them there would be no
    room for a second layer. Until the first layer ends, everything leaves as soon as it can: kept groups of that layer
    would be scattered over memory that stays reserved.
    """

    def __init__(self, counters: ByteCounters, leaving: LeavingQueue, num_layers: int) -> None:
        super().__init__(counters, leaving, None)
        self.releases_completed = True
        self._num_layers = num_layers
        self._layer: tuple[ChunkKey, int] | None = None  # layer of the last group
        self._own_bytes = self._foreign_bytes = 0  # in that layer so far
        self._largest_own_bytes = self._largest_foreign_bytes = 0

    def begin(self, actions: Sequence[Action], is_combined: bool) -> None:
        """See `Policy`."""
        super().begin(actions, is_combined)
        self._layer = None

    def must_release(self) -> bool:
        """See `Policy`."""
        if self._room.limit_bytes is None:
            return self.leaving.inflight_bytes > 2 * self.leaving.largest_bytes
        return super().must_release()

    def _commit(self, chunk: ChunkProgress, group: TensorGroup) -> Iterator[Move]:
        self._learn(group)
        return self._set_limit_behind(super()._commit(chunk, group), group)

    def _set_limit_behind(self, moves: Iterator[Move], group: TensorGroup) -> Iterator[Move]:
        yield from moves
        if group.ends_layer:
            self._set_limit()

    def _learn(self, group: TensorGroup) -> None:
        layer = group.chunk, group.layer
        if layer != self._layer:
            self._layer, self._own_bytes, self._foreign_bytes = layer, 0, 0
        self._own_bytes += group.own_bytes
        self._foreign_bytes += group.foreign_bytes

    def _set_limit(self) -> None:
        self._largest_own_bytes = max(self._largest_own_bytes, self._own_bytes)
        self._largest_foreign_bytes = max(self._largest_foreign_bytes, self._foreign_bytes)
        self._room.limit_bytes = self._num_layers * self._largest_own_bytes + self._largest_foreign_bytes
        self.releases_completed = False


class _Room(Horizon):
    """Computes the room left in a budget, which also bounds how far copy-ins may run ahead.

    Attributes:
        limit_bytes: bytes that may be resident; None: not known yet.
    """

    def __init__(self, counters: ByteCounters, limit_bytes: int | None) -> None:
        self.limit_bytes: int | None = limit_bytes
        self._counters = counters

    def has(self, nbytes: int) -> bool:
        """Return whether `nbytes` more fit."""
        return self.limit_bytes is None or self._counters.resident_bytes + nbytes <= self.limit_bytes

    def has_room(self, group: TensorGroup, is_in_forward: bool) -> bool:
        """See `Horizon`."""
        nbytes, limit = group.on_host_bytes, self.limit_bytes
        if nbytes == 0:
            return True
        ahead = self._counters.prefetched_bytes
        if is_in_forward and limit is not None and ahead and ahead + nbytes > SHARE_IN_FORWARD * limit:
            return False
        return self.has(nbytes)
