# SPDX-License-Identifier: Apache-2.0
"""`Horizon`: bounds how far ahead of the backward copy-ins may be issued."""

from __future__ import annotations

from offload_engine._saved.counters import ByteCounters
from offload_engine._saved.storage import TensorGroup


class Horizon:
    """Bounds how many groups are copied in, or recalled, ahead of their backward."""

    def has_room(self, group: TensorGroup, is_in_forward: bool) -> bool:
        """Return whether `group` may be copied in, or recalled, ahead of its backward.

        Args:
            group: next in the order of backward.
            is_in_forward: no backward has begun since the last forward began; that forward needs room, too.
        """
        raise NotImplementedError

    def may_issue_late(self, group: TensorGroup) -> bool:
        """Return whether to copy in a group that the backward has passed but may come back to."""
        return True

    def count_committed(self, group: TensorGroup) -> None:
        """Record the size of a group whose forward is over."""

    def count_issued(self, group: TensorGroup) -> None:
        """Count a group that is copied in, or recalled, ahead of its backward."""

    def count_reached(self, group: TensorGroup) -> None:
        """Stop counting a group whose backward begins."""

    def count_passed(self) -> None:
        """Stop counting groups issued for a backward that was predicted; a forward has begun instead."""

    def clear(self) -> None:
        """Forget the groups of the iteration."""


class HorizonBytes(Horizon):
    """Allows at most `limit_bytes` ahead, but always one group, unless the limit is 0.

    Args:
        counters: count the bytes of copy-ins that are not awaited yet.
        limit_bytes: None: twice the largest group so far.
    """

    def __init__(self, counters: ByteCounters, limit_bytes: int | None) -> None:
        self._counters = counters
        self._limit_bytes = limit_bytes
        self._largest_bytes = 0
        self._recalled: list[TensorGroup] = []  # copied in or recalled, and not reached by backward yet
        self._passed: list[TensorGroup] = []  # copied in for a backward that did not come

    def has_room(self, group: TensorGroup, is_in_forward: bool) -> bool:
        """See `Horizon`."""
        nbytes = group.on_host_bytes + group.leaving_bytes
        limit = 2 * self._largest_bytes if self._limit_bytes is None else self._limit_bytes
        ahead = self._counters.prefetched_bytes
        for other in self._recalled:
            ahead += other.recalled_bytes
        for other in self._passed:
            ahead -= other.arriving_bytes
        return limit > 0 and (ahead == 0 or nbytes == 0 or ahead + nbytes <= limit)

    def count_committed(self, group: TensorGroup) -> None:
        """See `Horizon`."""
        self._largest_bytes = max(self._largest_bytes, group.nbytes)

    def count_issued(self, group: TensorGroup) -> None:
        """See `Horizon`."""
        self._recalled.append(group)

    def count_reached(self, group: TensorGroup) -> None:
        """See `Horizon`."""
        if self._recalled:
            self._recalled = [other for other in self._recalled if other is not group and other.storages]
        if self._passed:
            self._passed = [other for other in self._passed if other is not group and other.storages]

    def count_passed(self) -> None:
        """See `Horizon`."""
        self._passed = [other for other in (*self._passed, *self._recalled) if other.storages]
        self._recalled = []

    def clear(self) -> None:
        """See `Horizon`. What a graph keeps stays copied in, and counted, for iterations to come."""
        self.count_passed()


class HorizonGroups(Horizon):
    """Allows at most `num_groups` groups with bytes on the device ahead of the group whose backward runs.

    Groups that the backward has passed do not count: only a retained graph keeps them, and waiting would not free them.
    """

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._ahead: list[TensorGroup] = []  # copied in or recalled, and not reached by backward yet

    def has_room(self, group: TensorGroup, is_in_forward: bool) -> bool:
        """See `Horizon`."""
        return self._has_room()

    def may_issue_late(self, group: TensorGroup) -> bool:
        """See `Horizon`."""
        if not self._has_room():
            return False
        self._ahead.append(group)
        return True

    def count_issued(self, group: TensorGroup) -> None:
        """See `Horizon`."""
        self._ahead.append(group)

    def count_reached(self, group: TensorGroup) -> None:
        """See `Horizon`."""
        self._ahead = [other for other in self._ahead if other.chunk != group.chunk or other.index < group.index]

    def count_passed(self) -> None:
        """See `Horizon`."""
        self._ahead = []

    def clear(self) -> None:
        """See `Horizon`."""
        self._ahead = []

    def _has_room(self) -> bool:
        self._ahead = [group for group in self._ahead if group.own_device_bytes]
        return len(self._ahead) < self._num_groups
