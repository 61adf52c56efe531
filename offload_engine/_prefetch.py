"""Which copy-in is issued when: the guess that keeps the backward from waiting.

Correctness never depends on it: an unpack whose copy-in was not issued issues it then, and counts a miss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from offload_engine._saved import Residency, SavedStorage, TensorGroup
from offload_engine._store import ActivationStore
from offload_engine.schedule import Action, ChunkKey


class ChunkGroups:
    """The groups of one chunk in the order of forward, and how far its prefetch has come."""

    def __init__(self, key: ChunkKey) -> None:
        self.key: ChunkKey = key
        self.groups: list[TensorGroup] = []
        self.is_forward_done: bool = False
        self.next_index: int = -1  # the group to prefetch next; counts down

    def end_forward(self) -> None:
        """All groups are there: prefetch may begin with the last. Idempotent."""
        if not self.is_forward_done:
            self.is_forward_done = True
            self.next_index = len(self.groups) - 1


class Prefetcher:
    """Issues copy-ins in the order in which the backward will ask, at most a horizon of bytes ahead of it."""

    def __init__(self, store: ActivationStore, horizon_bytes: int | None) -> None:
        self._store = store
        self._horizon_bytes = horizon_bytes
        self._largest_bytes = 0
        self._actions: Sequence[Action] = ()
        self._positions: dict[Action, int] = {}
        self._position = -1
        self._chunks: dict[ChunkKey, ChunkGroups] = {}
        self._backward_chunk: ChunkGroups | None = None  # the one whose backward was reached last

    def begin(self, actions: Sequence[Action] | None) -> None:
        """Start an iteration that will run `actions`; None: the backward takes chunks in reverse order of forward."""
        self.clear()
        self._actions = actions or ()
        self._positions = {action: i for i, action in enumerate(self._actions)}

    def clear(self) -> None:
        """Forget all chunks."""
        self._chunks = {}
        self._backward_chunk = None
        self._actions, self._positions, self._position = (), {}, -1

    def start_chunk(self, chunk: ChunkGroups) -> None:
        """The forward of `chunk` begins."""
        for other in self._chunks.values():
            other.end_forward()
        self._chunks.pop(chunk.key, None)  # a key used again goes to the end of the order
        self._chunks[chunk.key] = chunk
        self._backward_chunk = None
        self._position = self._positions.get(Action("F", chunk.key), self._position)

    def note_group(self, group: TensorGroup) -> None:
        """A group has committed: learn how large groups are."""
        self._largest_bytes = max(self._largest_bytes, group.nbytes)

    def reach(self, chunk: ChunkGroups, index: int) -> None:
        """The backward of group `index` of `chunk` begins: it, and what follows, is needed from now on."""
        chunk.end_forward()
        self._position = self._positions.get(Action("B", chunk.key), self._position)
        self._backward_chunk = chunk
        if chunk.next_index >= index:
            self._issue_late(chunk, index)
        if index == 0:
            self._chunks.pop(chunk.key, None)  # nothing of it is left to prefetch
        self.advance()

    def advance(self) -> None:
        """Issue copy-ins up to the horizon."""
        horizon = 2 * self._largest_bytes if self._horizon_bytes is None else self._horizon_bytes
        if horizon == 0:
            return
        for chunk in self._upcoming():
            while chunk.next_index >= 0:
                group = chunk.groups[chunk.next_index]
                on_host, nbytes = _on_host(group)
                ahead = self._store.prefetched_bytes
                if nbytes and ahead and ahead + nbytes > horizon:
                    return
                chunk.next_index -= 1
                self._store.recall(group)
                if on_host:
                    self._store.issue_copy_in(on_host)

    def _issue_late(self, chunk: ChunkGroups, index: int) -> None:
        """The backward overtook the prefetch: everything down to `index` is late, and is issued in one go."""
        while chunk.next_index >= index:
            on_host, _ = _on_host(chunk.groups[chunk.next_index])
            chunk.next_index -= 1
            if on_host:
                self._store.stats.prefetch_misses += len(on_host)
                self._store.issue_copy_in(on_host)

    def _upcoming(self) -> Iterator[ChunkGroups]:
        """Chunks whose backward is running or comes before any other forward, soonest first."""
        if not self._actions:
            yield from self._upcoming_without_schedule()
            return
        position = self._position
        if position < 0:
            return
        if self._actions[position].kind == "F":
            position += 1
        while position < len(self._actions) and self._actions[position].kind == "B":
            chunk = self._chunks.get(self._actions[position].chunk)
            if chunk is not None:  # else nothing of it is left to prefetch
                if not chunk.is_forward_done:
                    return
                yield chunk
            position += 1

    def _upcoming_without_schedule(self) -> Iterator[ChunkGroups]:
        current = self._backward_chunk
        if current is not None:
            yield current
        for chunk in reversed(list(self._chunks.values())):
            if not chunk.is_forward_done:
                return
            if chunk is not current:
                yield chunk


def _on_host(group: TensorGroup) -> tuple[list[SavedStorage], int]:
    storages = [saved for saved in group.storages if saved.residency is Residency.ON_HOST]
    return storages, sum(saved.nbytes for saved in storages)
