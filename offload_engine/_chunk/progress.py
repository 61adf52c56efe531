# SPDX-License-Identifier: Apache-2.0
"""`ChunkProgress`: lists the groups of one chunk, and the positions of its backward and its prefetch."""

from __future__ import annotations

from offload_engine._saved.storage import TensorGroup
from offload_engine.planning.shapes import awaits_tail, bringing_groups
from offload_engine.schedule import ChunkKey


class ChunkProgress:
    """Lists the groups of one chunk in the order of forward. The chunk adds groups; the policy moves the positions.

    Attributes:
        key: stage and microbatch.
        groups: the groups, in the order of forward.
        has_head: the backward comes at once, and the boundary HEAD comes between the layers and the loss.
        is_over: its iteration ended before its backward, which then prefetches nothing.
        is_forward_done: the list of groups is complete.
        prefetch_index: index of the group to prefetch next; counts down.
        backward_index: index of the group that the backward has reached, or near which it begins.
        tail_index: number of groups before the last block of the forward; -1: there is no such block.
        has_tail_end: the end of that block's backward will be reported.
        last_index_by_name: index of the last group of each name, once the forward is done.
        brought_by: for each group, the one whose backward brings it back; see `bringing_groups`.
        num_parts: number of groups of each layer and name so far.
    """

    def __init__(self, key: ChunkKey, has_head: bool = False) -> None:
        self.key: ChunkKey = key
        self.groups: list[TensorGroup] = []
        self.has_head: bool = has_head
        self.is_over: bool = False
        self.is_forward_done: bool = False
        self.prefetch_index: int = -1
        self.backward_index: int = 0
        self.tail_index: int = -1
        self.has_tail_end: bool = False
        self.last_index_by_name: dict[str, int] = {}
        self.brought_by: list[int] = []
        self.num_parts: dict[tuple[int, str], int] = {}

    def begin_tail(self, has_end: bool) -> None:
        """Mark the start of the last block of the forward. If called again, the last call counts.

        Args:
            has_end: `end_tail` will be called, when its backward is over.
        """
        self.tail_index, self.has_tail_end = len(self.groups), has_end

    @property
    def awaits_tail(self) -> bool:
        """Return whether the end of the tail's backward brings the first group back; see the function."""
        return self.has_tail_end and awaits_tail([group.name for group in self.groups], self.tail_index)

    def end_forward(self, is_combined: bool = False) -> None:
        """Allow prefetch to begin, with the last group. Idempotent.

        Args:
            is_combined: another forward runs together with the backward. Memory peaks where that begins, and its layers
                take as long as both: each group waits for the next one of its name, in the last layer as in any other.
        """
        if not self.is_forward_done:
            self.is_forward_done = True
            self.prefetch_index = len(self.groups) - 1
            self.last_index_by_name = {group.name: group.index for group in self.groups}
            self.brought_by = bringing_groups([(group.name, group.layer) for group in self.groups], is_combined)
            last = self.last_index_by_name.values()
            self.backward_index = min(last, default=0) if self.tail_index < 0 else self.tail_index
            if is_combined:
                self.backward_index = len(self.groups)
            elif self.awaits_tail:
                self.backward_index += 1

    def end_tail(self) -> None:
        """Note that the backward of the tail is over. Idempotent."""
        self.backward_index = min(self.backward_index, self.tail_index)

    def is_near(self, group: TensorGroup) -> bool:
        """Return whether the backward is at most a layer ahead of `group`."""
        return self.brought_by[group.index] >= self.backward_index

    def is_in_last_layer(self, group: TensorGroup) -> bool:
        """Return whether the backward of the chunk begins with this group's layer."""
        if group.layer == self.groups[-1].layer != -1:
            return True
        return self.last_index_by_name[group.name] == group.index  # layers are not known
