# SPDX-License-Identifier: Apache-2.0
"""`GroupStack`: owns the groups of one chunk and tracks which are open."""

from __future__ import annotations

from collections.abc import Iterator

from offload_engine._chunk.progress import ChunkProgress
from offload_engine._saved.storage import TensorGroup
from offload_engine.schedule import ChunkKey
from offload_engine.traits import GroupTraits


class GroupStack:
    """Owns the groups of one forward of one chunk. Its items are its groups, in the order of their commits.

    Args:
        key: stage and microbatch.
        keep_groups: indices of groups that stay resident.
        first_kept: groups from this index on stay resident too.
        has_head: see `ChunkProgress`.

    Attributes:
        progress: all groups of this forward.
        open_groups: innermost last.
        ungrouped: stands for tensors saved outside the groups.
    """

    def __init__(self, key: ChunkKey, keep_groups: frozenset[int], first_kept: int, has_head: bool) -> None:
        self.progress: ChunkProgress = ChunkProgress(key, has_head)
        self.open_groups: list[TensorGroup] = []
        self.ungrouped: TensorGroup = TensorGroup(
            key, -1, "outside the groups", GroupTraits(keep=True), is_ungrouped=True
        )
        self._key = key
        self._keep_groups = keep_groups
        self._first_kept = first_kept

    def __iter__(self) -> Iterator[TensorGroup]:
        return iter(self.progress.groups)

    def __len__(self) -> int:
        return len(self.progress.groups)

    def __getitem__(self, index: int) -> TensorGroup:
        return self.progress.groups[index]

    @property
    def innermost(self) -> TensorGroup | None:
        """Return the innermost open group, if any."""
        return self.open_groups[-1] if self.open_groups else None

    def has_saved(self) -> bool:
        """Return whether a graph still holds a storage that one of these groups saved first."""
        return any([saved.group is group for group in self.progress.groups for saved in list(group.storages)])

    def open(self, name: str, traits: GroupTraits | None = None) -> TensorGroup:
        """Open a group inside the innermost one, if any."""
        groups, num_parts = self.progress.groups, self.progress.num_parts
        index = len(groups)
        group = TensorGroup(self._key, index, name, traits)
        if index in self._keep_groups or index >= self._first_kept:
            group.is_kept = True
        place = group.layer, name
        group.part = num_parts.get(place, 0)
        num_parts[place] = group.part + 1
        groups.append(group)
        self.open_groups.append(group)
        return group

    def close(self) -> TensorGroup:
        """Close the innermost open group. It precedes those around it, whose backwards begin before its own."""
        group = self.open_groups.pop()
        outermost = self.open_groups[0] if self.open_groups else group
        if outermost.index < group.index and self.progress.groups[outermost.index] is outermost:
            self._put_before(group, outermost)  # else it was left open by an earlier forward
        return group

    def _put_before(self, group: TensorGroup, outermost: TensorGroup) -> None:
        groups, first = self.progress.groups, outermost.index
        del groups[group.index]
        for other in groups[first:]:
            if (other.layer, other.name) == (group.layer, group.name):
                group.part, other.part = group.part - 1, other.part + 1
        groups.insert(first, group)
        for index in range(first, len(groups)):
            groups[index].index = index

    def start_again(self) -> None:
        """Begin another forward of the same chunk."""
        self.progress = ChunkProgress(self._key, self.progress.has_head)
