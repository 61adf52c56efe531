# SPDX-License-Identifier: Apache-2.0
"""Lends the host bytes of one rank to copy-outs; copies that still read them return them."""

from __future__ import annotations

from typing import Final

from offload_engine._host.extents import FreeExtents, Taken
from offload_engine._host.unawaited import UnawaitedCopies
from offload_engine.planning.clocks import Clocks

_SMALLEST_SLAB: Final = 64 << 20
_GROWTH_DIVISOR: Final = 16
_WASTE_TOLERATED: Final = 1.08


class _Event:
    """The last copy that touches some host bytes, complete at `at` ms."""

    def __init__(self, at: float) -> None:
        self.at = at


class Lent:
    """Host bytes of one group."""

    def __init__(self, taken: Taken, nbytes: int) -> None:
        self.nbytes: int = nbytes
        self.slab: int = taken.slab
        self.start: int = taken.start
        self.free_at: float = max((event.at for event in taken.events), default=0.0)
        """Time from which on they may be written, in ms."""
        self.event: _Event | None = None  # of the copy with which they were returned


class HostBytes:
    """Simulates the host pool of one rank: it grows by slabs, which may be consolidated between two steps.

    Bytes that an unawaited copy-in still reads are lent last: a copy-out would wait for it instead of overlapping it.

    Args:
        peak_bytes: lent at the most in steps before; 0: there were none.
    """

    def __init__(self, peak_bytes: int = 0) -> None:
        self.lent_bytes: int = 0
        self.peak_lent_bytes: int = 0
        self._clocks: Clocks | None = None
        self._unawaited = UnawaitedCopies()
        self._slabs: list[int] = []
        self._free = self._no_extents()
        if peak_bytes:
            self._add_slab(_with_headroom(peak_bytes))

    def begin_step(self, clocks: Clocks) -> None:
        """Start a step with nothing lent; `clocks` tell which copies are complete."""
        total, peak = sum(self._slabs), self.peak_lent_bytes
        self._clocks, self.peak_lent_bytes = clocks, 0
        self._free.forget_events()
        if len(self._slabs) > 1 and total > _WASTE_TOLERATED * peak:
            self._slabs, self._free = [], self._no_extents()
            self._add_slab(_with_headroom(peak))

    def lend(self, nbytes: int) -> Lent:
        """Lend `nbytes` bytes."""
        self.lent_bytes += nbytes
        self.peak_lent_bytes = max(self.peak_lent_bytes, self.lent_bytes)
        taken = self._free.take(nbytes)
        if taken is None:
            self._add_slab(max(nbytes, _SMALLEST_SLAB, sum(self._slabs) // _GROWTH_DIVISOR))
            taken = self._free.take(nbytes)
        assert taken is not None
        return Lent(taken, nbytes)

    def return_bytes(self, lent: Lent, read_until: float, is_unawaited: bool) -> None:
        """Return bytes that a copy touches until `read_until`; `is_unawaited`: compute has not awaited that copy."""
        self.lent_bytes -= lent.nbytes
        lent.event = _Event(read_until)
        self._free.put(lent.slab, lent.start, lent.nbytes, (lent.event,))
        if is_unawaited:
            self._unawaited.add(lent.event)

    def note_awaited(self, lent: Lent) -> None:
        """Note that compute has awaited the copy with which `lent` was returned."""
        self._unawaited.forget(lent.event)

    def _is_complete(self, event: _Event) -> bool:
        return self._clocks is not None and self._clocks.is_over(event.at)

    def _no_extents(self) -> FreeExtents:
        return FreeExtents(self._is_complete, self._unawaited)

    def _add_slab(self, nbytes: int) -> None:
        self._free.put(len(self._slabs), 0, nbytes)
        self._slabs.append(nbytes)


def _with_headroom(peak_bytes: int) -> int:
    return peak_bytes * 33 // 32
