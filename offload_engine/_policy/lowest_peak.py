# SPDX-License-Identifier: Apache-2.0
"""Implements the policies that copy out as early as possible: `LowestPeak`, fixed bounds, SageMaker's windows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from offload_engine._chunk.progress import ChunkProgress
from offload_engine._policy.horizon import Horizon, HorizonBytes, HorizonGroups
from offload_engine._policy.leaving import LeavingQueue
from offload_engine._policy.policy import Move
from offload_engine._policy.reactive import Reactive
from offload_engine._saved.counters import ByteCounters
from offload_engine._saved.storage import TensorGroup
from offload_engine.planning.moves import (
    BACKWARD,
    BACKWARD_END,
    CHUNK_BACKWARD,
    COMMIT,
    DROP,
    HEAD,
    ITERATION_END,
    LOSS_DONE,
    OUT,
    TAIL,
    UNKEEP,
    BoundaryKind,
)


class LowestPeakPolicy(Reactive):
    """Releases each copy-out when it completes, or earlier, by a wait, at the memory peaks of a step.

    - The peak of a pipeline is where the backward of one chunk begins after the forward of another. Copy-outs that this
      forward issued before its tail are released there: the tail took about as long as these copies, so the wait is
      short.
    - The peak of a chunk whose backward comes at once is in its loss. With a head, copy-outs issued a layer before the
      first kept group are released at that group, because they have had the time of a layer, and all others at the
      head; without a head, all are released at the first kept group.
    - A running copy slows the host down, and before the experts the device waits for the host. So the copy-out of a
      group with `may_delay` is issued after that wait. At most half of the bytes that may be in flight are delayed, and
      none once the link has fallen behind.
    """

    brings_only_last_layer = True
    releases_older_chunks: bool = True
    """Whether a chunk's backward waits for copy-outs that other chunks issued before the last tail."""

    def __init__(
        self,
        counters: ByteCounters,
        leaving: LeavingQueue,
        horizon: Horizon | None = None,
        max_inflight_bytes: int | None = None,
    ) -> None:
        super().__init__(counters, leaving, HorizonBytes(counters, None) if horizon is None else horizon)
        self._max_inflight_bytes = max_inflight_bytes
        self._delayed: list[TensorGroup] = []  # committed groups whose copy-out is yet to be issued
        self._tail_number = 0  # number of the first copy-out after the start of the last tail

    def clear(self) -> None:
        """See `Policy`."""
        super().clear()
        self._delayed = []

    def must_release(self) -> bool:
        """See `Policy`."""
        limit = self._max_inflight_bytes
        return self.leaving.inflight_bytes > (2 * self.leaving.largest_bytes if limit is None else limit)

    def at(self, kind: BoundaryKind, chunk: ChunkProgress | None, group: TensorGroup | None) -> Iterable[Move]:
        """See `Policy`."""
        if kind is BACKWARD_END:
            return self._end_backward(chunk)
        if kind is COMMIT and group is not None and group.may_delay and self._may_delay(group):
            self._delayed.append(group)
            self._horizon.count_committed(group)
            return self._copy_ins_ahead()
        if self._delayed and not _passes_delayed(kind, group):
            return self._with_delayed(kind, chunk, group)
        if group is not None and not group.is_kept and chunk is not None:  # nearly always
            if kind is COMMIT:
                return self._commit(chunk, group)
            if kind is BACKWARD:
                return self._begin_backward(chunk, group)
        return self._answer(kind, chunk, group)

    def _with_delayed(
        self, kind: BoundaryKind, chunk: ChunkProgress | None, group: TensorGroup | None
    ) -> Iterator[Move]:
        """Yield the delayed copy-outs, in the order of their commits, before all other moves."""
        delayed, self._delayed = self._delayed, []
        for other in delayed:
            yield OUT, other
        yield from self._answer(kind, chunk, group)

    def _answer(self, kind: BoundaryKind, chunk: ChunkProgress | None, group: TensorGroup | None) -> Iterable[Move]:
        if chunk is None:
            return _drops(self.leaving.groups) if kind is ITERATION_END else ()
        if group is not None:
            if kind is COMMIT:
                return self._keep(chunk, group) if group.is_kept else self._commit(chunk, group)
            return super().at(kind, chunk, group)
        if kind is TAIL:
            self._tail_number = self.leaving.num_issued
            return ()
        if kind is HEAD:
            return _drops(self.leaving.groups)
        if kind is CHUNK_BACKWARD:
            return _drops(self._older_than_tail(chunk)) if self.releases_older_chunks else ()
        return super().at(kind, chunk, group)

    def _keep(self, chunk: ChunkProgress, group: TensorGroup) -> Iterator[Move]:
        if not chunk.has_head:
            yield from _drops(self.leaving.groups)
        elif group is next(other for other in chunk.groups if other.is_kept):  # the last layer begins
            yield from _drops(self._a_layer_before(group))
        yield from self._commit(chunk, group)

    def _older_than_tail(self, chunk: ChunkProgress) -> list[TensorGroup]:
        """Return the groups copied out before the last tail, up to the first of `chunk`, which is needed soon."""
        older = []
        for group in self.leaving.groups_before(self._tail_number):
            if group.chunk == chunk.key:
                break
            older.append(group)
        return older

    def _a_layer_before(self, kept: TensorGroup) -> list[TensorGroup]:
        """Return the groups copied out up to the group with the same name a layer before `kept`."""
        groups = self.leaving.groups
        num_older = 0
        for number, group in enumerate(groups, 1):
            if group.name == kept.name and (group.chunk != kept.chunk or group.layer < kept.layer):
                num_older = number
        return groups[:num_older]

    def _may_delay(self, group: TensorGroup) -> bool:
        if group.is_kept:
            return False
        nbytes = group.own_bytes + sum(other.own_bytes for other in self._delayed)
        limit = 2 * self.leaving.largest_bytes if self._max_inflight_bytes is None else self._max_inflight_bytes
        return 2 * nbytes <= limit and self.leaving.inflight_bytes + nbytes <= limit


class FixedBoundsPolicy(LowestPeakPolicy):
    """Applies fixed bounds to `LowestPeak`; each bound also switches off the stricter rule of that policy.

    Args:
        horizon_bytes: bound on bytes copied in ahead of the backward; if set, groups of every layer may be.
        max_inflight_bytes: bound on bytes of copy-out in flight; if set, no backward waits for copies within it.
    """

    def __init__(
        self,
        counters: ByteCounters,
        leaving: LeavingQueue,
        horizon_bytes: int | None,
        max_inflight_bytes: int | None,
    ) -> None:
        super().__init__(counters, leaving, HorizonBytes(counters, horizon_bytes), max_inflight_bytes)
        self.brings_only_last_layer = horizon_bytes is None
        self.releases_older_chunks = max_inflight_bytes is None


class PrefetchWindowPolicy(LowestPeakPolicy):
    """Copies in up to `num_groups` groups ahead of the group whose backward runs, as SageMaker's v1."""

    brings_only_last_layer = False

    def __init__(
        self, counters: ByteCounters, leaving: LeavingQueue, num_groups: int, max_inflight_bytes: int | None
    ) -> None:
        super().__init__(counters, leaving, HorizonGroups(num_groups), max_inflight_bytes)
        self.releases_older_chunks = max_inflight_bytes is None


class GroupWindowPolicy(LowestPeakPolicy):
    """Keeps at most `num_groups` groups on the device, including the one in use, as SageMaker's v2."""

    brings_only_last_layer = False

    def __init__(
        self, counters: ByteCounters, leaving: LeavingQueue, num_groups: int, max_inflight_bytes: int | None
    ) -> None:
        super().__init__(counters, leaving, HorizonGroups(num_groups - 1), max_inflight_bytes)
        self.releases_older_chunks = max_inflight_bytes is None
        # One less, because the output of the running group is the input of the next one.
        self._max_inflight_groups = num_groups - 1

    def must_release(self) -> bool:
        """See `Policy`."""
        return len(self.leaving.queue) > self._max_inflight_groups or super().must_release()

    def _may_delay(self, group: TensorGroup) -> bool:
        return False  # a delayed group would stay on the device, uncounted


def _passes_delayed(kind: BoundaryKind, group: TensorGroup | None) -> bool:
    """Return whether delayed copy-outs stay delayed at this boundary, for instance in another chunk's backward."""
    if kind is COMMIT:
        return group is not None and group.is_kept
    return kind is BACKWARD_END or kind is LOSS_DONE or kind is CHUNK_BACKWARD or kind is HEAD or kind is UNKEEP


def _drops(groups: list[TensorGroup]) -> Iterator[Move]:
    for group in groups:
        yield DROP, group
