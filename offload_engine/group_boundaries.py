# SPDX-License-Identifier: Apache-2.0
"""`GroupBoundaries`: opens and commits the groups of a chunk."""

from __future__ import annotations

from offload_engine._chunk.group_stack import GroupStack
from offload_engine._policy.executor import Executor
from offload_engine._saved.storage import TensorGroup
from offload_engine.errors import OffloadError
from offload_engine.planning.moves import BACKWARD, COMMIT, FORWARD
from offload_engine.traits import GroupTraits


class GroupBoundaries:
    """Opens and commits the groups of one chunk, and begins their backwards.

    Separate from `ChunkOffloadHandler`, because these methods run for each group and are compiled; a class whose base
    is TransformerEngine's cannot be compiled.

    Args:
        executor: called at each boundary.
        groups: of the chunk.

    Attributes:
        current_group: in forward, one more than the index of the group opened last; in backward, the index of the group
            that runs.
    """

    def __init__(self, executor: Executor, groups: GroupStack) -> None:
        self.current_group: int = 0
        self._executor = executor
        self._groups = groups

    def open(self, name: str, traits: GroupTraits | None = None) -> TensorGroup:
        """See `ChunkOffloadHandler.open_group`."""
        if self._executor.is_capturing():  # tested in line, because this runs for each group
            self._executor.refuse_capture(f"group {name!r} begins")
        groups = self._groups
        if self.current_group == 0 and groups.progress.groups and groups.progress.is_forward_done:
            # Another pass of the same handler, after the backward of the last one reached the first group.
            groups.start_again()
            self._executor.at(FORWARD, groups.progress)
        group = groups.open(name, traits)
        self.current_group = group.index + 1
        return group

    def close(self, keep: bool = False, ends_layer: bool = False) -> TensorGroup:
        """See `ChunkOffloadHandler.close_group`."""
        progress = self._groups.progress
        if not self._groups.open_groups:
            raise OffloadError(
                f"{progress.key!r} has no open group to commit; call open_group() or group_start() first"
            )
        group = self._groups.close()
        group.ends_layer = ends_layer
        if keep:
            self._executor.keep(group)
        else:
            self._executor.at(COMMIT, progress, group)
        return group

    def begin_backward(self, group: TensorGroup | None) -> None:
        """See `ChunkOffloadHandler.on_group_commit_backward`."""
        progress = self._groups.progress
        groups = progress.groups
        index = max(self.current_group - 1, 0) if group is None else group.index
        self.current_group = index
        if not progress.is_over:  # otherwise another iteration may have a chunk with the same key
            self._executor.at(BACKWARD, progress, groups[index] if index < len(groups) else None)
