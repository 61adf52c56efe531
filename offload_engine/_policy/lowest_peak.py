"""The policies under which everything leaves as soon as it can, by fixed bounds and by SageMaker's windows too."""

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
    BACKWARD_END,
    CHUNK_BACKWARD,
    COMMIT,
    DROP,
    HEAD,
    ITERATION_END,
    LOSS_DONE,
    OUT,
    TAIL,
    BoundaryKind,
)


class LowestPeakPolicy(Reactive):
    """Releases each copy-out as it completes, and where memory has its peak before that.

    - The peak of a pipeline is where the backward of one chunk begins behind the forward of another. What that forward
      copied out before its tail is released there: the tail took about as long as these copies, so the wait is short.
    - The peak of a chunk whose backward comes at once is in its loss. With a head, what left a layer before the first
      kept group is released at that group, since it has had the time of a layer, and all at the head; without one,
      all at the first kept group.
    - While a copy is under way the host works more slowly, and in front of the experts the device waits for the host.
      So the copy-out of a group with `may_delay` is issued behind that wait. At most half of what may be in flight is
      delayed, and nothing once the link is behind.
    """

    brings_only_last_layer = True
    releases_older_chunks: bool = True
    """Whether a chunk's backward waits for what other chunks copied out before the last tail."""

    def __init__(
        self,
        counters: ByteCounters,
        leaving: LeavingQueue,
        horizon: Horizon | None = None,
        max_inflight_bytes: int | None = None,
    ) -> None:
        super().__init__(counters, leaving, HorizonBytes(counters, None) if horizon is None else horizon)
        self._max_inflight_bytes = max_inflight_bytes
        self._delayed: list[TensorGroup] = []  # committed; their copy-out is yet to be issued
        self._tail_number = 0  # of the first copy-out behind the begin of the last tail

    def clear(self) -> None:
        """See `Policy`."""
        super().clear()
        self._delayed = []
        self._tail_number = 0

    def must_release(self) -> bool:
        """See `Policy`."""
        limit = self._max_inflight_bytes
        return self.leaving.inflight_bytes > (2 * self.leaving.largest_bytes if limit is None else limit)

    def at(self, kind: BoundaryKind, chunk: ChunkProgress | None, group: TensorGroup | None) -> Iterable[Move]:
        """See `Policy`."""
        if kind is BACKWARD_END:
            return self._copy_ins_ahead()
        if kind is COMMIT and group is not None and group.may_delay and self._may_delay(group):
            self._delayed.append(group)
            self._horizon.count_committed(group)
            return self._copy_ins_ahead()
        if self._delayed and not _passes_delayed(kind, group):
            return self._with_delayed(kind, chunk, group)
        return self._answer(kind, chunk, group)

    def _with_delayed(
        self, kind: BoundaryKind, chunk: ChunkProgress | None, group: TensorGroup | None
    ) -> Iterator[Move]:
        """Issue the delayed copy-outs, in the order of their commits, in front of all else."""
        delayed, self._delayed = self._delayed, []
        for other in delayed:
            yield Move(OUT, other)
        yield from self._answer(kind, chunk, group)

    def _answer(self, kind: BoundaryKind, chunk: ChunkProgress | None, group: TensorGroup | None) -> Iterable[Move]:
        if chunk is not None:
            if kind is COMMIT and group is not None and group.is_kept:
                return self._keep(chunk, group)
            if kind is TAIL:
                chunk.begin_tail()
                self._tail_number = self.leaving.num_issued
                return ()
            if kind is HEAD:
                return _drops(self.leaving.groups)
            if kind is CHUNK_BACKWARD:
                return _drops(self._older_than_tail(chunk)) if self.releases_older_chunks else ()
        elif kind is ITERATION_END:
            return _drops(self.leaving.groups)
        return super().at(kind, chunk, group)

    def _keep(self, chunk: ChunkProgress, group: TensorGroup) -> Iterator[Move]:
        if not chunk.has_head:
            yield from _drops(self.leaving.groups)
        elif group is next(other for other in chunk.groups if other.is_kept):  # the last layer begins
            yield from _drops(self._a_layer_before(group))
        yield from self._commit(chunk, group)

    def _older_than_tail(self, chunk: ChunkProgress) -> list[TensorGroup]:
        """Copy-outs issued before the last tail, up to the first of `chunk` itself: that one is needed soon."""
        older = []
        for group in self.leaving.groups_before(self._tail_number):
            if group.chunk == chunk.key:
                break
            older.append(group)
        return older

    def _a_layer_before(self, kept: TensorGroup) -> list[TensorGroup]:
        """Copy-outs up to that of the group of the same name a layer before `kept`."""
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
    """The lowest peak with fixed bounds; each replaces a bound, and the rule of that policy that goes beyond it.

    Args:
        horizon_bytes: ahead of the backward; then groups of every layer come back as far as these bytes allow.
        max_inflight_bytes: that may be in flight; then no backward waits for copies within them.
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
    """SageMaker's v1: copy-ins run so many groups ahead of the group whose backward runs."""

    brings_only_last_layer = False

    def __init__(
        self, counters: ByteCounters, leaving: LeavingQueue, num_groups: int, max_inflight_bytes: int | None
    ) -> None:
        super().__init__(counters, leaving, HorizonGroups(num_groups), max_inflight_bytes)
        self.releases_older_chunks = max_inflight_bytes is None


class GroupWindowPolicy(LowestPeakPolicy):
    """SageMaker's v2: at most so many groups are on the device, the one in use included, in forward and backward."""

    brings_only_last_layer = False

    def __init__(
        self, counters: ByteCounters, leaving: LeavingQueue, num_groups: int, max_inflight_bytes: int | None
    ) -> None:
        super().__init__(counters, leaving, HorizonGroups(num_groups - 1), max_inflight_bytes)
        self.releases_older_chunks = max_inflight_bytes is None
        # One less: the output of the group that runs is the input of the next.
        self._max_inflight_groups = num_groups - 1

    def must_release(self) -> bool:
        """See `Policy`."""
        return len(self.leaving.queue) > self._max_inflight_groups or super().must_release()

    def _may_delay(self, group: TensorGroup) -> bool:
        return False  # groups on the device are counted


def _passes_delayed(kind: BoundaryKind, group: TensorGroup | None) -> bool:
    """Return whether delayed copy-outs stay delayed at a boundary: those of another chunk's backward, for one."""
    if kind is COMMIT:
        return group is not None and group.is_kept
    return kind is BACKWARD_END or kind is LOSS_DONE or kind is CHUNK_BACKWARD or kind is HEAD


def _drops(groups: list[TensorGroup]) -> Iterator[Move]:
    for group in groups:
        yield Move(DROP, group)
