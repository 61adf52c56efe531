"""How far ahead of the backward copy-ins may be issued: four ways to bound it."""

from __future__ import annotations

from typing import Final

from offload_engine._saved.accounts import Accounts
from offload_engine._saved.storage import COPYING_IN, ON_HOST, RESIDENT, TensorGroup
from offload_engine.config import OffloadConfig


class Horizon:
    """Decides whether the copy-in of one more group may be issued. This one, the base of the others, always agrees.

    Attributes:
        is_asked_for: somebody has set how far it reaches, so it alone bounds what comes back for a chunk whose backward
            has not come near its groups; else that is less, see `Prefetcher`.
    """

    def __init__(self, is_asked_for: bool = True) -> None:
        self.is_asked_for: bool = is_asked_for

    def has_room(self, arriving_bytes: int, staying_bytes: int, is_in_forward: bool = False) -> bool:
        """True if another group may come back, or stay before its release, ahead of its backward.

        Args:
            arriving_bytes: that it would copy in.
            staying_bytes: that would not leave.
            is_in_forward: no backward was reached since a forward began, which needs room, too.
        """
        return True

    def admit_late(self, group: TensorGroup) -> bool:
        """True if `group` may be copied in, which the backward has passed by, perhaps to come back to it."""
        return True

    def note_committed(self, group: TensorGroup) -> None:
        """The forward of `group` is over."""

    def note_issued(self, group: TensorGroup) -> None:
        """`group` stays, or is copied in, ahead of its backward."""

    def note_reached(self, group: TensorGroup) -> None:
        """The backward of `group` begins."""

    def note_passed(self) -> None:
        """A forward begins instead of the backward that copies were issued for: they are not ahead of any other."""

    def clear(self) -> None:
        """Forget all groups."""


class HorizonBytes(Horizon):
    """At most so many bytes that were issued, or were not released, for a backward to come; 0: nothing ahead.

    One group is always allowed.

    Args:
        accounts: of those bytes.
        limit: the bytes; None: twice the largest group seen so far.
    """

    def __init__(self, accounts: Accounts, limit: int | None) -> None:
        super().__init__(is_asked_for=limit is not None)
        self._accounts = accounts
        self._limit = limit
        self._largest_bytes = 0
        self._staying: list[TensorGroup] = []  # issued, or recalled before their release, not reached yet
        self._passed: list[TensorGroup] = []

    def has_room(self, arriving_bytes: int, staying_bytes: int, is_in_forward: bool = False) -> bool:
        """See `Horizon`."""
        nbytes = arriving_bytes + staying_bytes
        limit = 2 * self._largest_bytes if self._limit is None else self._limit
        ahead = self._accounts.prefetched_bytes
        for group in self._staying:
            ahead += _staying_bytes(group)
        for group in self._passed:
            ahead -= _arriving_bytes(group)
        return limit > 0 and (ahead == 0 or nbytes == 0 or ahead + nbytes <= limit)

    def note_committed(self, group: TensorGroup) -> None:
        """See `Horizon`."""
        if group.nbytes > self._largest_bytes:
            self._largest_bytes = group.nbytes

    def note_issued(self, group: TensorGroup) -> None:
        """See `Horizon`."""
        self._staying.append(group)

    def note_reached(self, group: TensorGroup) -> None:
        """See `Horizon`."""
        if self._staying:
            self._staying = [other for other in self._staying if other is not group and other.storages]
        if self._passed:
            self._passed = [other for other in self._passed if other is not group and other.storages]

    def note_passed(self) -> None:
        """See `Horizon`."""
        self._passed += self._staying
        self._staying = []

    def clear(self) -> None:
        """See `Horizon`."""
        self._staying, self._passed = [], []


class ResidentHorizon(Horizon):
    """As far as `Accounts.resident_limit_bytes` has room.

    During a forward no more than a share of it is for what comes back, and always one group: that forward would have to
    wait for the copies of what it saves as soon as all of the room is taken.
    """

    _SHARE_IN_FORWARD: Final = 0.25

    def __init__(self, accounts: Accounts) -> None:
        super().__init__()
        self._accounts = accounts

    def has_room(self, arriving_bytes: int, staying_bytes: int, is_in_forward: bool = False) -> bool:
        """See `Horizon`."""
        if arriving_bytes == 0:
            return True
        limit, ahead = self._accounts.resident_limit_bytes, self._accounts.prefetched_bytes
        if is_in_forward and limit is not None and ahead and ahead + arriving_bytes > self._SHARE_IN_FORWARD * limit:
            return False
        return self._accounts.has_resident_room(arriving_bytes)


class HorizonGroups(Horizon):
    """At most so many groups with bytes on the device for a backward to come, besides the group whose backward runs.

    What the backward has left behind does not count: only a retained graph keeps it, and waiting would not free it.
    """

    def __init__(self, num_ahead: int) -> None:
        super().__init__()
        self._num_ahead = num_ahead
        self._ahead: list[TensorGroup] = []  # issued, or not released, and not reached yet

    def has_room(self, arriving_bytes: int, staying_bytes: int, is_in_forward: bool = False) -> bool:
        """See `Horizon`."""
        self._ahead = [group for group in self._ahead if _is_on_device(group)]
        return len(self._ahead) < self._num_ahead

    def admit_late(self, group: TensorGroup) -> bool:
        """See `Horizon`."""
        if not self.has_room(0, 0):
            return False
        self.note_issued(group)
        return True

    def note_issued(self, group: TensorGroup) -> None:
        """See `Horizon`."""
        self._ahead.append(group)

    def note_reached(self, group: TensorGroup) -> None:
        """See `Horizon`."""
        self._ahead = [other for other in self._ahead if other.chunk != group.chunk or other.index < group.index]

    def note_passed(self) -> None:
        """See `Horizon`."""
        self._ahead = []

    def clear(self) -> None:
        """See `Horizon`."""
        self._ahead = []


def make_horizon(config: OffloadConfig, accounts: Accounts) -> Horizon:
    """The one that `config` asks for."""
    if config.horizon_groups is not None:
        return HorizonGroups(config.horizon_groups - 1)  # one place is that of the group in use
    if config.prefetch_layers is not None:
        return HorizonGroups(config.prefetch_layers)
    if config.resident_bytes is not None:
        return ResidentHorizon(accounts)
    return HorizonBytes(accounts, config.horizon_bytes)


def _staying_bytes(group: TensorGroup) -> int:
    """Bytes that `group` saved first and that have not left."""
    # Of a copy: the collector may retire one of them meanwhile, which takes it out of its group.
    nbytes = 0
    for saved in list(group.storages):
        if saved.copied_in is None and saved.copied_out is not None and saved.residency is RESIDENT:
            nbytes += saved.nbytes if saved.group is group else 0
    return nbytes


def _arriving_bytes(group: TensorGroup) -> int:
    """Bytes that `group` saved first and whose copy-in is issued and not used."""
    # Of a copy: the collector may retire one of them meanwhile, which takes it out of its group.
    nbytes = 0
    for saved in list(group.storages):
        if saved.residency is COPYING_IN and saved.group is group:
            nbytes += saved.nbytes
    return nbytes


def _is_on_device(group: TensorGroup) -> bool:
    """True if bytes that `group` saved first are there; what it shares with an earlier group stays for that one too."""
    # Of a copy: the collector may retire one of them meanwhile, which takes it out of its group.
    return any(saved.group is group and saved.residency is not ON_HOST for saved in list(group.storages))
