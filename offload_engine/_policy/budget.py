"""What a budget of resident bytes leaves on the device: the end of a forward, as far as there is room for it."""

from __future__ import annotations

from collections import deque

from offload_engine._saved.accounts import Accounts
from offload_engine._saved.storage import TensorGroup


class Budget:
    """Decides which groups need not leave, because they and all that is still to be saved fit.

    How much is still to be saved is a guess: as much as had been saved when the last backward began. It decides what is
    copied in vain, never what is right. Where more is saved than that, what was to stay leaves late.

    To copy these groups as well would do more harm than load the link: a backward that has used such a tensor would
    wait, before its memory can be used again, for a copy that stands behind all the others.
    """

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._expected_bytes: int | None = None  # saved, wherever it was, when the last backward began
        self._is_in_forward = False
        self._staying: deque[TensorGroup] = deque()  # oldest first

    def note_forward(self) -> None:
        """A forward begins."""
        self._is_in_forward = True

    def note_backward(self) -> None:
        """A backward begins: what has stayed is needed now. Idempotent."""
        if self._is_in_forward:
            self._expected_bytes = self._accounts.saved_bytes
            self._is_in_forward = False
        self._staying.clear()

    def clear(self) -> None:
        """Forget the groups, but not how much a forward saves."""
        self._is_in_forward = False
        self._staying.clear()

    def may_stay(self, group: TensorGroup, leaving_bytes: int, reserve_bytes: int, is_next: bool) -> bool:
        """True if `group`, just saved, need not leave now. It may have to later: see `pop_oldest`.

        Args:
            group: has committed.
            leaving_bytes: of what is resident, those with a copy-out issued.
            reserve_bytes: to be left free.
            is_next: nothing comes between this forward and its backward. Else what stays would take the room of what
                is on its way out and back for others, and not be needed first: so all stays, or nothing.
        """
        limit = self._accounts.resident_limit_bytes
        if limit is None or self._expected_bytes is None:
            return False
        to_come_bytes = max(0, self._expected_bytes - self._accounts.saved_bytes)
        staying_bytes = self._accounts.resident_bytes - leaving_bytes if is_next else self._accounts.saved_bytes
        fits = staying_bytes + to_come_bytes + reserve_bytes <= limit
        if not fits and not self._staying:  # else an older one leaves, which is needed later
            return False
        self._staying.append(group)
        return True

    def pop_oldest(self) -> TensorGroup | None:
        """The first of the groups that were to stay, for there is no room left; None if there is none."""
        return self._staying.popleft() if self._staying else None
