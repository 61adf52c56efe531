# SPDX-License-Identifier: Apache-2.0
"""`RankReports`: makes one table of a recorded step of all ranks, without a collective.

Ranks put their sums into the store of the process group, and rank 0 fetches them. So no GPU communicator is used, and
if a rank does not take part, the others only get a table without it.
"""

from __future__ import annotations

import pickle
import time
from typing import Any, Final

import torch

from offload_engine._compat import torch_private
from offload_engine._observe.fold import RankSums, sums_of
from offload_engine._observe.record import StepRecord
from offload_engine._observe.report import table_of_ranks

_ANNOUNCED: Final = "announced"


class RankReports:
    """Gathers the records that the ranks of the process group have of one step on rank 0.

    A rank calls `announce`, trains at least one step that waits for the others, as the reduction of gradients does,
    and calls `share`. Rank 0 then knows which ranks will share, and looks after each step, by `table`, which have.
    No call waits for another rank. Without a process group there is one rank.

    Args:
        name: distinguishes reports that are gathered at the same time; the same on all ranks.
        timeout_s: how long rank 0 looks for announced records, from its first look on.
    """

    def __init__(self, name: str, timeout_s: float = 20.0) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._ticket = 0
        self._found: list[RankSums] = []
        self._missing: list[int] | None = None  # tickets; None before the first look
        self._num_without_record = 0
        self._deadline = 0.0

    def announce(self) -> None:
        """Declare that this rank will call `share`."""
        rank, store = _rank_and_store(self._name)
        if rank > 0 and store is not None:
            self._ticket = store.add(_ANNOUNCED, 1)

    def share(self, record: StepRecord | None) -> bool:
        """Send the record that `announce` declared.

        Args:
            record: of this rank, if it has one.

        Returns:
            Whether this is rank 0, which will have the tables.
        """
        rank, store = _rank_and_store(self._name)
        own = None if record is None else sums_of(record)
        if rank == 0 and own is not None:
            self._found.append(own)
        elif rank > 0 and self._ticket:
            store.set(str(self._ticket), pickle.dumps(own))
        return rank == 0 and not self._ticket  # without its process group every rank seems to be rank 0

    def table(self, is_last_look: bool = False) -> str | None:
        """Return the tables of all ranks on rank 0, once all have arrived or time is up.

        Args:
            is_last_look: do not wait for ranks that have not arrived.

        Returns:
            None: look again. Empty: none has a record.
        """
        _, store = _rank_and_store(self._name)
        if store is not None:
            self._look(store)
        if self._missing and not is_last_look and time.monotonic() < self._deadline:
            return None
        ranks = sorted(self._found, key=lambda sums: sums.rank)
        text = table_of_ranks(ranks) if ranks else ""
        if num_missing := self._num_without_record + len(self._missing or ()):
            text += f"{num_missing} other ranks offload, but had no record of this step in time\n"
        return text

    def _look(self, store: Any) -> None:
        """Fetch the sums that ranks have shared since the last look from the store."""
        if self._missing is None:
            num_announced = store.add(_ANNOUNCED, 0)
            store.add(_ANNOUNCED, -num_announced)
            self._missing = list(range(1, num_announced + 1))
            self._deadline = time.monotonic() + self._timeout_s
        for ticket in [ticket for ticket in self._missing if store.check([str(ticket)])]:
            sums: RankSums | None = pickle.loads(store.get(str(ticket)))  # noqa: S301  # a rank of ours has written it
            store.delete_key(str(ticket))
            self._missing.remove(ticket)
            if sums is None:
                self._num_without_record += 1
            else:
                self._found.append(sums)


def _rank_and_store(name: str) -> tuple[int, Any]:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, None
    store = torch_private.default_store()
    return distributed.get_rank(), None if store is None else distributed.PrefixStore(f"offload_engine/{name}", store)
