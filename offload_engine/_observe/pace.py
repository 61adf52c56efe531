# SPDX-License-Identifier: Apache-2.0
"""Sets the pace at which a record is made from its notes: at once for a waiting caller, slowly beside training."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import Final, Protocol, TypeVar

_WORK_S: Final = 0.0002
_REST_S: Final = 0.002
T = TypeVar("T")


class Pace(Protocol):
    """Passes items on, each when its turn has come."""

    def __call__(self, items: Iterable[T], /) -> Iterable[T]: ...


def at_once(items: Iterable[T], /) -> Iterable[T]:
    """Pass all items on without a rest."""
    return items


class AtLeisure:
    """Rests ten times as long as it works, until a caller waits for the record.

    Two threads never run Python code at the same time: a thread without rests would keep another one from launching
    kernels for nearly as long as it works.
    """

    def __init__(self) -> None:
        self._is_awaited = threading.Event()
        self._rest_at = perf_counter()

    def __call__(self, items: Iterable[T], /) -> Iterator[T]:
        for item in items:
            if perf_counter() > self._rest_at:
                self._is_awaited.wait(_REST_S)
                self._rest_at = perf_counter() + _WORK_S
            yield item

    def hurry(self) -> None:
        """Stop resting. A thread calls it before it waits for the record."""
        self._is_awaited.set()
