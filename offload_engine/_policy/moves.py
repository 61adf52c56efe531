"""What happens at each group boundary, in forward and in backward."""

from __future__ import annotations

from offload_engine._devices.base import Event
from offload_engine._policy.budget import Budget
from offload_engine._policy.horizon import ResidentHorizon
from offload_engine._policy.prefetch import ChunkGroups, Prefetcher, on_host_storages
from offload_engine._policy.release import ReleaseQueue
from offload_engine._saved.storage import TensorGroup
from offload_engine._saved.store import ActivationStore


class Mover:
    """Turns the boundaries of groups into copy-outs, releases and copy-ins."""

    def __init__(self, store: ActivationStore, releases: ReleaseQueue, prefetcher: Prefetcher, dry_run: bool) -> None:
        self.store: ActivationStore = store
        self.releases: ReleaseQueue = releases
        self.prefetcher: Prefetcher = prefetcher
        self.budget: Budget = Budget(store.accounts)
        self._dry_run = dry_run
        self._waiting: list[tuple[TensorGroup, list[Event]]] = []  # committed; their copy-out is yet to be issued

    def limit_resident(self, nbytes: int) -> None:
        """Bound what is resident, and by that alone what is in flight and how far ahead copy-ins are issued."""
        if self.store.accounts.resident_limit_bytes is None:
            self.prefetcher.use_horizon(ResidentHorizon(self.store.accounts))
        self.store.accounts.resident_limit_bytes = nbytes

    def start_chunk(self, chunk: ChunkGroups) -> None:
        """The forward of `chunk` begins."""
        self.issue_waiting()
        self.budget.note_forward()
        self.prefetcher.start_chunk(chunk)
        self._advance()

    def begin_tail(self, chunk: ChunkGroups) -> None:
        """A long computation begins that ends the forward of `chunk`."""
        chunk.begin_tail()
        self.issue_waiting()  # else it would count among the copies of the tail
        self.releases.begin_tail()

    def end_tail(self, chunk: ChunkGroups) -> None:
        """The backward of `chunk` begins, perhaps long before that of its last group."""
        self.releases.advance()
        self.releases.end_tail(chunk.key)

    def begin_head(self) -> None:
        """The layers of a chunk are through whose backward comes at once: what it still allocates is for the loss."""
        self.releases.before_peak()

    def commit(self, group: TensorGroup, chunk: ChunkGroups, has_head: bool = False) -> None:
        """The forward of `group` is over; with `has_head`, `begin_head` will say when `chunk` comes to its loss."""
        has_limit = self.store.accounts.resident_limit_bytes is not None
        if group.is_kept:
            self.keep(group)
            if not has_head:
                self.releases.before_peak()
            elif group is next(other for other in chunk.groups if other.is_kept):  # the last layer begins
                self.releases.release_layer_before(group)
        else:
            self._note(group)
            if not self._dry_run and not (has_limit and self._may_stay(group, chunk)):
                if group.may_wait and not has_limit and self._has_room_to_wait(group):
                    self._waiting.append((group, self.store.note_produced(group)))
                else:
                    self.issue_waiting()
                    self.copy_out(group)
        self._advance()
        if has_limit:
            self._make_room()

    def keep(self, group: TensorGroup) -> None:
        """`group` stays resident: its backward comes at once."""
        self._note(group)
        self.store.accounts.stats.num_kept_groups += 1
        self.store.accounts.stats.kept_bytes += group.own_bytes

    def keep_no_longer(self, group: TensorGroup) -> None:
        """The backward of `group`, which was to stay for it, does not come at once."""
        group.is_kept = False
        self.store.accounts.stats.num_kept_groups -= 1
        self.store.accounts.stats.kept_bytes -= group.own_bytes
        self.copy_out(group)

    def copy_out(self, group: TensorGroup, produced: list[Event] | None = None) -> None:
        """Issue the copy-out of what `group` saved first; `produced` as in `ActivationStore.issue_copy_out`.

        Nothing in a dry run.
        """
        if self._dry_run:
            return
        issued = self.store.issue_copy_out(group, produced)
        if issued is not None:
            self.releases.push(issued)

    def pass_host_wait(self) -> None:
        """The device has caught up with the host, and has work again."""
        self.issue_waiting()
        self._advance()

    def issue_waiting(self) -> None:
        """Issue the copy-outs that wait for it, in the order of their commits."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for group, produced in waiting:
                self.copy_out(group, produced)

    def copy_in(self, group: TensorGroup) -> None:
        """Issue the copy-in of what `group` has on host, ahead of the prefetch."""
        self.store.issue_copy_in(on_host_storages(group))

    def end_loss(self, chunk: ChunkGroups) -> None:
        """The backward of `chunk` has come through its loss: its groups are next."""
        self._enter_backward(chunk)
        self._advance()

    def begin_backward(self, chunk: ChunkGroups, index: int) -> None:
        """The backward of group `index` of `chunk` begins."""
        if self.store.has_failed:
            self.store.raise_failure()
        self.issue_waiting()
        self.releases.advance()
        self.budget.note_backward()
        self._enter_backward(chunk)
        self.prefetcher.reach(chunk, index)
        if index < len(chunk.groups):
            self.store.await_copy_in(chunk.groups[index])  # early wait: one for the group, where unpack has one each
        self.prefetcher.advance()

    def end_backward(self) -> None:
        """The backward of a group is over."""
        self._advance()

    def end_iteration(self) -> None:
        """The last backward is over: release what is left."""
        self.store.raise_failure()
        self.issue_waiting()
        self.releases.drain()
        self.prefetcher.clear()
        self.budget.clear()

    def reset_iteration(self) -> None:
        """Forget the iteration; the store has yet to abandon what was saved."""
        self._waiting = []
        self.releases.clear()
        self.prefetcher.clear()
        self.budget.clear()

    def _enter_backward(self, chunk: ChunkGroups) -> None:
        if not self.prefetcher.is_in_backward(chunk):
            self.prefetcher.enter_backward(chunk)

    def _has_room_to_wait(self, group: TensorGroup) -> bool:
        return self.releases.has_room_to_wait(sum(waiting.own_bytes for waiting, _ in self._waiting) + group.own_bytes)

    def _may_stay(self, group: TensorGroup, chunk: ChunkGroups) -> bool:
        is_next = self.prefetcher.is_next(chunk)
        return self.budget.may_stay(group, self.releases.inflight_bytes, self.releases.largest_bytes, is_next)

    def _make_room(self) -> None:
        """More was saved than the budget expected: what was to stay leaves after all."""
        while not self.releases.has_resident_room and (group := self.budget.pop_oldest()) is not None:
            self.copy_out(group)
            self.releases.advance()

    def _note(self, group: TensorGroup) -> None:
        self.store.accounts.stats.num_groups += 1
        self.prefetcher.note_group(group)

    def _advance(self) -> None:
        if self.store.has_failed:
            self.store.raise_failure()
        # Release first: the host bytes and the device bytes it frees are there for the copy-ins.
        self.releases.advance()
        self.prefetcher.advance()
