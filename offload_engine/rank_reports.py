"""`RankReports`: one table of a recorded step of all ranks, without a collective.

Ranks leave what they have summed up in the store of the process group, and rank 0 fetches it. So no rank has to take
part, no group of GPUs is used, and a rank that does not come costs the others nothing but a table without it.
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
_POLL_S: Final = 0.01


class RankReports:
    """What the ranks of the process group have recorded of one step, on its way to rank 0.

    A rank calls `announce`, trains at least one step that waits for the others, as the reduction of gradients does,
    and calls `share`. Rank 0 then knows for whom to wait. Without a process group there is one rank.

    Args:
        name: told apart by it from others that are under way at the same time; the same on all ranks.
        timeout_s: how long rank 0 waits for those that are announced.
    """

    def __init__(self, name: str, timeout_s: float = 20.0) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._ticket = 0

    def announce(self) -> None:
        """Declare that this rank will call `share`."""
        rank, store = _rank_and_store(self._name)
        if rank > 0 and store is not None:
            self._ticket = store.add(_ANNOUNCED, 1)

    def share(self, record: StepRecord | None) -> str | None:
        """Give what was announced.

        Args:
            record: of this rank, if it has one.

        Returns:
            On rank 0 the tables of all ranks, empty if none has a record; None on the others.
        """
        rank, store = _rank_and_store(self._name)
        own = None if record is None else sums_of(record)
        if rank > 0:
            if self._ticket:
                store.set(str(self._ticket), pickle.dumps(own))
            return None
        others = [] if store is None else self._fetch(store)
        found = [sums for sums in (own, *others) if sums is not None]
        text = table_of_ranks(sorted(found, key=lambda sums: sums.rank)) if found else ""
        if None in others:
            text += f"{others.count(None)} other ranks offload, but had no record of this step in time\n"
        return text

    def _fetch(self, store: Any) -> list[RankSums | None]:
        """Take out of the store what the announced ranks have put there; None for those that do not come."""
        num_announced = store.add(_ANNOUNCED, 0)
        deadline = time.monotonic() + self._timeout_s
        found = [_take(store, str(ticket), deadline) for ticket in range(1, num_announced + 1)]
        store.add(_ANNOUNCED, -num_announced)
        return found


def _take(store: Any, key: str, deadline: float) -> RankSums | None:
    # Polled: `store.wait` would keep other threads of this process, as those of NCCL, from the store.
    while not store.check([key]):
        if time.monotonic() >= deadline:
            return None
        time.sleep(_POLL_S)
    sums: RankSums | None = pickle.loads(store.get(key))  # noqa: S301  # a rank of ours has written it
    store.delete_key(key)
    return sums


def _rank_and_store(name: str) -> tuple[int, Any]:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, None
    store = torch_private.default_store()
    return distributed.get_rank(), None if store is None else distributed.PrefixStore(f"offload_engine/{name}", store)
