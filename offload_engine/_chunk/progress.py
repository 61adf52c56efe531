# SPDX-License-Identifier: Apache-2.0
"""`ChunkProgress`: lists the groups of one chunk, and the positions of its backward and its prefetch."""

from __future__ import annotations

from offload_engine._saved.storage import TensorGroup
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
        backward_index: index of the group that the backward has reached, or will reach first.
        last_index_by_name: index of the last group of each name, once the forward is done.
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
        self.last_index_by_name: dict[str, int] = {}
        self.num_parts: dict[tuple[int, str], int] = {}

    def begin_tail(self) -> None:
        """Mark the start of the last block of the forward. If called again, the last call counts."""
        self.backward_index = len(self.groups)

    def end_forward(self) -> None:
        """Allow prefetch to begin, with the last group. Idempotent."""
        if not self.is_forward_done:
            self.is_forward_done = True
            self.prefetch_index = len(self.groups) - 1
            self.last_index_by_name = {group.name: group.index for group in self.groups}

    def is_near(self, group: TensorGroup) -> bool:
        """Return whether the backward has reached the last group with the name of `group`, one layer ahead."""
        return self.last_index_by_name[group.name] >= self.backward_index

    def is_in_last_layer(self, group: TensorGroup) -> bool:
        """Return whether the backward of the chunk begins with this group's layer."""
        if group.layer == self.groups[-1].layer != -1:
            return True
        return self.last_index_by_name[group.name] == group.index  # layers are not known
