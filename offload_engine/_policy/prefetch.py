"""Which copy-in is issued when: the guess that keeps the backward from waiting.

Correctness never depends on it: an unpack whose copy-in was not issued issues it then, and counts a miss.
"""

from __future__ import annotations

from collections.abc import Sequence

from offload_engine._policy.horizon import Horizon
from offload_engine._saved.storage import COPYING_OUT, ON_HOST, SavedStorage, TensorGroup
from offload_engine._saved.store import ActivationStore
from offload_engine.schedule import Action, ChunkKey


class ChunkGroups:
    """The groups of one chunk in the order of forward, and how far its backward and its prefetch have come."""

    def __init__(self, key: ChunkKey) -> None:
        self.key: ChunkKey = key
        self.groups: list[TensorGroup] = []
        self.is_forward_done: bool = False
        self.next_index: int = -1  # the group to prefetch next; counts down
        self.near_index: int = 0  # the backward has come to this group, or comes to it as soon as it begins
        self.last_of_name: dict[str, int] = {}  # of each name the last group; once the forward is done

    def begin_tail(self) -> None:
        """A long computation begins that ends the forward; the last call counts."""
        self.near_index = len(self.groups)

    def end_forward(self) -> None:
        """All groups are there: prefetch may begin with the last. Idempotent."""
        if not self.is_forward_done:
            self.is_forward_done = True
            self.next_index = len(self.groups) - 1
            self.last_of_name = {group.name: group.index for group in self.groups}


class Prefetcher:
    """Issues copy-ins in the order in which the backward will ask, no further ahead of it than the horizon."""

    def __init__(self, store: ActivationStore, horizon: Horizon) -> None:
        self._store = store
        self._horizon = horizon
        self._actions: Sequence[Action] = ()
        self._is_combined = False
        self._positions: dict[Action, int] = {}
        self._chunks: dict[ChunkKey, ChunkGroups] = {}
        self._backward_chunk: ChunkGroups | None = None  # the one whose backward was reached last
        self._window: list[ChunkGroups] = []  # chunks that may be prefetched now, soonest first

    def begin(self, actions: Sequence[Action] | None, is_combined: bool) -> None:
        """Start an iteration that will run `actions`; None: the backward takes chunks in reverse order of forward."""
        self.clear()
        self._is_combined = is_combined
        self._actions = actions or ()
        self._positions = {action: i for i, action in enumerate(self._actions)}

    def clear(self) -> None:
        """Forget all chunks."""
        self._horizon.clear()
        self._actions, self._positions = (), {}
        self._chunks, self._window, self._backward_chunk = {}, [], None

    def start_chunk(self, chunk: ChunkGroups) -> None:
        """The forward of `chunk` begins."""
        for other in self._chunks.values():
            other.end_forward()
        if not self._actions and self._backward_chunk is not None:
            # The backward of these was to come before this forward. It may come late, or never.
            self._chunks.clear()
            self._horizon.note_passed()
        self._chunks.pop(chunk.key, None)  # a key used again goes to the end of the order
        self._chunks[chunk.key] = chunk
        self._backward_chunk = None
        self._window = self._upcoming(self._positions.get(Action("F", chunk.key), len(self._actions)) + 1)

    def use_horizon(self, horizon: Horizon) -> None:
        """From now on `horizon` bounds what is issued ahead."""
        self._horizon = horizon

    def note_group(self, group: TensorGroup) -> None:
        """A group has committed: learn how large groups are."""
        self._horizon.note_committed(group)

    def is_in_backward(self, chunk: ChunkGroups) -> bool:
        """True if the backward of `chunk` was reached last, and no forward has begun since."""
        return chunk is self._backward_chunk

    def is_next(self, chunk: ChunkGroups) -> bool:
        """True if nothing comes between the forward of `chunk`, which runs, and its backward, as far as is known."""
        if not self._actions:
            return True
        position = self._positions.get(Action("F", chunk.key), len(self._actions)) + 1
        return position < len(self._actions) and self._actions[position] == Action("B", chunk.key)

    def enter_backward(self, chunk: ChunkGroups) -> None:
        """The backward of `chunk` begins: its groups come first from now on."""
        chunk.end_forward()
        if self._is_combined and self._backward_chunk is not None:
            for other in self._chunks.values():  # a forward runs together with one backward; this is another
                other.end_forward()
        self._backward_chunk = chunk
        self._chunks.pop(chunk.key, None)
        following = self._upcoming(self._positions.get(Action("B", chunk.key), len(self._actions)) + 1)
        self._window = [chunk, *(following if self._actions else reversed(self._chunks.values()))]

    def reach(self, chunk: ChunkGroups, index: int) -> None:
        """The backward of group `index` of `chunk`, which was entered, begins: it, and what follows, is needed now."""
        if index < chunk.near_index:
            chunk.near_index = index
        if index < len(chunk.groups):
            self._horizon.note_reached(chunk.groups[index])
        if chunk.next_index >= index:
            self._issue_late(chunk, index)

    def advance(self) -> None:
        """Issue copy-ins up to the horizon."""
        window = self._window
        while window:
            if window[0].next_index < 0:
                window.pop(0)
            elif not self._issue_next(window[0]):
                return

    def _issue_next(self, chunk: ChunkGroups) -> bool:
        """Issue the copy-in of one more group; False if that would go beyond the horizon."""
        group = chunk.groups[chunk.next_index]
        on_host_bytes = leaving_bytes = 0
        for saved in list(group.storages):  # a copy, see `on_host_storages`
            if saved.residency is ON_HOST:
                on_host_bytes += saved.nbytes
            elif saved.residency is COPYING_OUT:
                leaving_bytes += saved.nbytes
        # Behind a tail a group comes back once the backward is at the last of its name, a layer ahead; but for that
        # last one, see below. What never left needs no memory to come back into, and may stay from its begin on.
        is_near = chunk.last_of_name[group.name] >= chunk.near_index or not on_host_bytes
        if not (is_near and chunk is self._backward_chunk or self._is_needed_first(chunk)):
            return False
        if not self._horizon.has_room(on_host_bytes, leaving_bytes, self._backward_chunk is None):
            return False
        chunk.next_index -= 1
        if leaving_bytes:
            self._store.recall(group)
        self._horizon.note_issued(group)
        if on_host_bytes:
            self._store.issue_copy_in(group.storages)
        return True

    def _is_needed_first(self, chunk: ChunkGroups) -> bool:
        """Whether the next group of `chunk` may come back before the backward comes near any of its groups."""
        if not self._actions and chunk is not self._backward_chunk:  # nobody has said that this backward will come
            return chunk.next_index == len(chunk.groups) - 1
        if self._horizon.is_asked_for:
            return True
        # The groups of its last layer. Where they are used memory has its peak, and what a loss has just freed is for
        # the weight gradients of the tail, which would find it in pieces; those of the layer before have the whole of
        # that backward to come back. Where nobody has told the layers, the last of each name are taken for it.
        group, last = chunk.groups[chunk.next_index], chunk.groups[-1]
        if group.layer == last.layer != -1:
            return True
        return chunk.last_of_name[group.name] == group.index

    def _issue_late(self, chunk: ChunkGroups, index: int) -> None:
        """The backward overtook the prefetch: everything down to `index` is late, and is issued in one go."""
        while chunk.next_index >= index:
            group = chunk.groups[chunk.next_index]
            on_host = on_host_storages(group)
            chunk.next_index -= 1
            if on_host and (group.index == index or self._horizon.admit_late(group)):
                self._store.accounts.stats.prefetch_misses += len(on_host)
                self._store.issue_copy_in(on_host)

    def _upcoming(self, position: int) -> list[ChunkGroups]:
        """Chunks whose backward comes at `position` or later and before any other forward, soonest first.

        A forward that runs together with the backward behind it does not come before that one.
        """
        chunks: list[ChunkGroups] = []
        num_forwards_to_pass = int(self._is_combined)
        for action in self._actions[position:]:
            chunk = self._chunks.get(action.chunk)
            if action.kind == "F" and num_forwards_to_pass:
                num_forwards_to_pass -= 1
                continue
            if action.kind == "F" or chunk is None or not chunk.is_forward_done:
                break
            chunks.append(chunk)
        return chunks


def on_host_storages(group: TensorGroup) -> list[SavedStorage]:
    """What a copy-in of `group` would have to move."""
    # Of a copy: the collector may retire one of them meanwhile, which takes it out of its group.
    return [saved for saved in list(group.storages) if saved.residency is ON_HOST]
