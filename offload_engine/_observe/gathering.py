# SPDX-License-Identifier: Apache-2.0
"""`Gathering`: takes what the ranks of the process group have to say to rank 0, without a collective.

Ranks put it into the store of the process group, and rank 0 fetches it. So no GPU communicator is used, and if a rank
does not take part, the others only get an answer without it.
"""

from __future__ import annotations

import pickle
from typing import Any, Final

import torch

from offload_engine._compat import torch_private

_ANNOUNCED: Final = "announced"


class Gathering:
    """Gathers one object of each rank that has announced one.

    A rank calls `announce`, trains at least one step that waits for the others, as the reduction of gradients does,
    and calls `share`. Rank 0 then knows which ranks will share, and looks, by `look`, which have. No call waits for
    another rank. Without a process group there is one rank.

    Args:
        name: distinguishes what is gathered at the same time; the same on all ranks.

    Attributes:
        found: what has arrived, in any order.
        num_without: number of ranks that have shared None.
    """

    def __init__(self, name: str) -> None:
        self.found: list[Any] = []
        self.num_without: int = 0
        self._name = name
        self._ticket = 0
        self._missing: list[int] | None = None  # tickets; None before the first look

    def announce(self) -> None:
        """Declare that this rank will call `share`."""
        rank, store = self._rank_and_store()
        if rank > 0 and store is not None:
            self._ticket = store.add(_ANNOUNCED, 1)

    def share(self, own: object) -> bool:
        """Send what `announce` declared.

        Args:
            own: can be pickled; None: this rank has nothing to say.

        Returns:
            Whether this is rank 0, which looks.
        """
        rank, store = self._rank_and_store()
        if rank == 0 and own is not None:
            self.found.append(own)
        elif rank > 0 and self._ticket:
            store.set(str(self._ticket), pickle.dumps(own))
        return rank == 0 and not self._ticket  # without its process group every rank seems to be rank 0

    @property
    def num_missing(self) -> int:
        """Return the number of ranks that had not shared at the last look."""
        return len(self._missing or ())

    def look(self) -> None:
        """Fetch on rank 0 what has been shared since the last look."""
        _, store = self._rank_and_store()
        if store is None:
            return
        if self._missing is None:
            num_announced = store.add(_ANNOUNCED, 0)
            store.add(_ANNOUNCED, -num_announced)
            self._missing = list(range(1, num_announced + 1))
        for ticket in [ticket for ticket in self._missing if store.check([str(ticket)])]:
            shared = pickle.loads(store.get(str(ticket)))  # noqa: S301  # a rank of ours has written it
            store.delete_key(str(ticket))
            self._missing.remove(ticket)
            if shared is None:
                self.num_without += 1
            else:
                self.found.append(shared)

    def _rank_and_store(self) -> tuple[int, Any]:
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return 0, None
        store, prefix = torch_private.default_store(), f"offload_engine/{self._name}"
        return distributed.get_rank(), None if store is None else distributed.PrefixStore(prefix, store)
