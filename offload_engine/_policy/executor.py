# SPDX-License-Identifier: Apache-2.0
"""`Executor`: performs the moves of a policy, and enforces the rules that no policy can break."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from torch.autograd import profiler

from offload_engine._chunk.progress import ChunkProgress
from offload_engine._devices.base import Device, Event
from offload_engine._observe.recorder import Recorder
from offload_engine._policy.keeping import Keeping
from offload_engine._policy.leaving import LeavingQueue
from offload_engine._policy.policy import Policy
from offload_engine._saved.mover import CopyOut
from offload_engine._saved.storage import TensorGroup
from offload_engine._saved.store import ActivationStore
from offload_engine._saved.transfers import fork_copy_streams, join_copy_streams
from offload_engine.errors import OffloadError
from offload_engine.planning.moves import (
    BACKWARD,
    COMMIT,
    DROP,
    IN,
    ITERATION_END,
    OUT,
    TURN_AROUND,
    UNKEEP,
    BoundaryKind,
)
from offload_engine.schedule import Action

_profiler: Final[Any] = profiler  # tested before each range: an unused range would cost a microsecond a group

_EAGERLY = (
    "{} outside a capture, but one was announced: pass the capturing context, such as torch.cuda.graph(graph), to "
    "graphs.capture(), and run nothing else inside it."
)
_UNANNOUNCED = (
    "{} inside the capture of a CUDA graph that was not announced: capture a whole step by `with "
    "engine.graphs.capture(torch.cuda.graph(graph)):`. Capture single parts of a step only if they are not offloaded."
)


class Executor:
    """Calls the policy at each boundary and performs its moves. Only it issues, releases and awaits copies of groups.

    [Its own rules]

     1. Completed copy-outs are released. At each boundary, and after each copy-out, they are released, oldest first, if
        the policy allows it (`Policy.releases_completed`).
     2. Back-pressure. At each boundary, and after each copy-out, compute waits for the oldest copy-outs while
        `Policy.must_release`. It is a stream wait: a host that runs ahead is not blocked.
     3. A backward that begins waits for the copy-in of its group, and a group whose copy-in is late is counted.
        `ActivationStore.unpack` copies in storages that no move brought back.
     4. A failed copy is raised at the next boundary.
     5. A backward that begins right after its forward, unannounced, recalls the groups that its chunk is copying out.
     6. A group that is chosen to be kept is not copied out, unless it has outgrown the choice: see `Keeping`. Nor is a
        group beyond the share of its chunk that may leave: see `LeavingShare`.

    Args:
        store: owns the storages of the groups.
        device: tests whether a copy has completed.
        policy: answers boundaries with moves.
        leaving: the queue that the policy reads.
        keeping: chooses groups that are kept.
        dry_run: account for groups, but issue no copy-out.
    """

    def __init__(
        self,
        store: ActivationStore,
        device: Device,
        policy: Policy,
        leaving: LeavingQueue,
        keeping: Keeping,
        dry_run: bool,
    ) -> None:
        self.store: ActivationStore = store
        self.policy: Policy = policy
        self.leaving: LeavingQueue = leaving
        self._moves = store.moves
        self._retired = store.retired
        self._is_complete = device.is_complete
        self.is_capturing: Callable[[], bool] = bool if device.graphs is None else device.graphs.is_capturing
        self._dry_run = dry_run
        self._context, self._ranges = store.context, store.context.ranges
        self._keeping = keeping
        self._produced: dict[TensorGroup, list[Event]] = {}  # of delayed copy-outs: recorded at their commits
        self._in_backward: TensorGroup | None = None  # the group whose backward has begun last

    def begin_iteration(self, actions: Sequence[Action], is_combined: bool) -> None:
        """Start an iteration; see `Policy.begin`."""
        if self._context.is_captured:
            fork_copy_streams(self._context)
        if self._keeping.share is not None:
            self._keeping.share.begin(actions)
        self.policy.begin(actions, is_combined)

    def at(self, kind: BoundaryKind, chunk: ChunkProgress | None = None, group: TensorGroup | None = None) -> None:
        """Perform the moves with which the policy answers a boundary; see `Policy.at`.

        Raises:
            CopyError: if a copy has failed; names the group.
            OffloadError: if the host tier is full and `host_policy` is "error".
            KeyboardInterrupt: if one came in a destructor, where Python ignores it.
        """
        with self._retired, self._retired.lock:  # once, not per move: it takes as long as the bookkeeping of a move
            self._at(kind, chunk, group)

    def _at(self, kind: BoundaryKind, chunk: ChunkProgress | None, group: TensorGroup | None) -> None:
        store, late_from = self.store, -1
        if self._context.recorder is not None:
            self._note_boundary(self._context.recorder, kind, chunk, group)
        if store.failures.has_failed:
            store.failures.raise_deferred()  # Rule 4
        if self.leaving.queue:
            self._release_due()
        if group is not None:
            if kind is BACKWARD:
                self._await(group)  # Rule 3
                late_from = group.index
                self._check_last_backward(group)
            elif kind is COMMIT:
                self._commit(group)
            elif kind is UNKEEP:
                self._unkeep(group)
        for op, moved in self.policy.at(kind, chunk, group):
            if op is OUT:
                self.copy_out(moved)
            elif op is DROP:
                self._release_group(moved)
            elif late_from >= 0 and chunk is not None and moved.chunk == chunk.key and moved.index >= late_from:
                store.counters.stats.prefetch_misses += self.copy_in(moved)
                if moved is group:
                    self._await(moved)  # Rule 3
            else:
                self.copy_in(moved)
        if self._keeping.kept and kind is COMMIT and group is not None and self._keeping.outgrows(group):
            self.copy_out(group)  # a plan has no move for it
        if self._context.recorder is not None:
            self._context.recorder.note_moved()

    def copy_out(self, group: TensorGroup) -> None:
        """Issue the copy-out of a group's own storages. No-op for those that have left or stay, and in a dry run.

        Raises:
            OffloadError: if the host tier is full and `host_policy` is "error".
        """
        produced = self._produced.pop(group, None)
        if self._dry_run or group.stays:
            return
        if _profiler._is_profiler_enabled or self._ranges.is_nvtx_on:
            with self._ranges.around(OUT, group):
                issued = self._moves.issue_copy_out(group, produced)
        else:
            issued = self._moves.issue_copy_out(group, produced)
        if issued is not None:
            if self._context.recorder is not None:
                self._context.recorder.note_move(OUT, group, issued.nbytes)
            self.leaving.push(issued)
            self._release_due()  # again: copies may have completed while host memory was being pinned

    def copy_in(self, group: TensorGroup) -> int:
        """Recall a group's storages that are leaving and copy in those on host; return the number copied in."""
        if group.leaving_bytes:
            self._recall(group)
        nbytes = group.on_host_bytes
        if not nbytes:
            return 0
        if self._context.recorder is not None:
            self._context.recorder.note_move(IN, group, nbytes)
        if _profiler._is_profiler_enabled or self._ranges.is_nvtx_on:
            with self._ranges.around(IN, group):
                return self._moves.issue_copy_in(group)
        return self._moves.issue_copy_in(group)

    def refuse_capture(self, what: str) -> None:
        """Raise an error in a capture that was not announced, where events cannot be queried nor copies batched.

        Args:
            what: clause that says what is about to begin, for the error.

        Raises:
            OffloadError: if the current stream captures unannounced, or does not although it was announced.
        """
        if self.is_capturing() == self._context.is_captured:
            return
        if self._context.is_captured:
            raise OffloadError(_EAGERLY.format(what))
        raise OffloadError(_UNANNOUNCED.format(what))

    def turn_around(self, chunk: ChunkProgress) -> None:
        """Recall the groups of `chunk` that are being copied out, because its backward follows its forward (rule 5).

        Unlike `at`, this releases nothing first: completed copy-outs would have to be copied in again.
        """
        if self._context.recorder is not None:
            self._note_boundary(self._context.recorder, TURN_AROUND, chunk, None)
        with self._retired, self._retired.lock:
            for group in chunk.groups:
                if group.leaving_bytes:
                    self._recall(group)

    def keep(self, group: TensorGroup) -> None:
        """Commit a group that stays resident, because its backward comes at once."""
        group.is_kept = True
        self._count(group)

    def end_iteration(self) -> bool:
        """Perform the policy's moves at the end of the iteration; return whether a backward of its groups has run.

        Raises:
            CopyError: if a copy has failed; names the group.
        """
        self.at(ITERATION_END)
        has_backward, self._in_backward = self._in_backward is not None, None
        self._produced.clear()
        self.policy.clear()
        if self._context.is_captured:
            join_copy_streams(self._context)
        return has_backward

    def _check_last_backward(self, following: TensorGroup) -> None:
        last, self._in_backward = self._in_backward, following
        if last is not None and last.storages:  # mostly a retained graph
            self.store.check_handles(last)

    def _commit(self, group: TensorGroup) -> None:
        self._count(group)
        if self._keeping.kept:
            group.stays = self._keeping.may_stay(group)
        elif self._keeping.share is not None:
            group.stays = self._keeping.share.stays(group)
        if group.may_delay and not (group.is_kept or group.stays or self._dry_run):
            self._produced[group] = self._moves.record_produced(group)

    def _count(self, group: TensorGroup) -> None:
        stats = self.store.counters.stats
        stats.num_groups += 1
        if group.is_kept:
            stats.num_kept_groups += 1
            stats.kept_bytes += group.own_bytes

    def _unkeep(self, group: TensorGroup) -> None:
        group.is_kept = False
        if self._keeping.kept and not group.stays:
            group.stays = self._keeping.may_stay(group)
        self.store.counters.stats.num_kept_groups -= 1
        self.store.counters.stats.kept_bytes -= group.own_bytes

    def _recall(self, group: TensorGroup) -> None:
        if self._context.recorder is not None:
            self._context.recorder.note_move(IN, group, group.leaving_bytes)
        self._moves.recall(group)

    def _release_due(self) -> None:
        leaving, policy = self.leaving, self.policy
        while leaving.queue and (
            policy.must_release()  # Rule 2
            or (policy.releases_completed and self._is_complete(leaving.queue[0].copied_out))  # Rule 1
        ):
            self._release(leaving.pop())

    def _release(self, issued: CopyOut) -> None:
        before = issued.group.on_host_bytes
        if _profiler._is_profiler_enabled or self._ranges.is_nvtx_on:
            with self._ranges.around(DROP, issued.group):
                self._moves.release(issued)
        else:
            self._moves.release(issued)
        released = issued.group.on_host_bytes - before  # without storages that were recalled or are held elsewhere
        if self._context.recorder is not None and released > 0:
            self._context.recorder.note_move(DROP, issued.group, released)

    def _note_boundary(
        self, recorder: Recorder, kind: BoundaryKind, chunk: ChunkProgress | None, group: TensorGroup | None
    ) -> None:
        recorder.note_boundary(kind, None if chunk is None else chunk.key, group)
        counters = self.store.counters
        recorder.note_counters(counters.resident_bytes, self.leaving.inflight_bytes, self.store.lent_bytes)

    def _await(self, group: TensorGroup) -> None:
        """Make the current stream wait once for the group, where unpack would wait for each storage."""
        if _profiler._is_profiler_enabled or self._ranges.is_nvtx_on:
            with self._ranges.around("wait", group):
                self._moves.await_copy_in(group)  # early wait
        else:
            self._moves.await_copy_in(group)  # early wait

    def _release_group(self, group: TensorGroup) -> None:
        issued = self.leaving.take(group)
        if issued is not None:
            self._release(issued)
