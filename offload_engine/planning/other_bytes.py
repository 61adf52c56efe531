# SPDX-License-Identifier: Apache-2.0
"""`OtherBytes`: what is on the device beside groups, at each boundary of a step."""

from __future__ import annotations

from collections.abc import Mapping

from offload_engine.planning.moves import Boundary, BoundaryKind
from offload_engine.planning.residents import Residents

Moment = tuple[BoundaryKind, int, int]
"""A boundary of any microbatch: kind, virtual stage, and index of the group."""


class OtherBytes:
    """Tells the peak of a step from the bytes of groups in it. Peaks are kept: many choices ask for the same few steps.

    Args:
        before: bytes of all else but groups before each boundary; and, for steps with other microbatches, before the
            same boundary of any microbatch.
        early: how many bytes of groups were released early, because copy-outs were complete. Empty if that is random.
        always: bytes of all else at any time, instead of both, where a device reports groups alone. None: it does not.

    Attributes:
        before: see the argument.
        early: see the argument.
        always: see the argument.
    """

    def __init__(
        self,
        before: Mapping[Boundary | Moment, int],
        early: Mapping[Boundary | Moment, int],
        always: int | None = None,
    ) -> None:
        self.before: Mapping[Boundary | Moment, int] = before
        self.early: Mapping[Boundary | Moment, int] = early
        self.always: int | None = always
        self._peaks: dict[tuple[Residents, float], int] = {}

    @property
    def most(self) -> int:
        """Return the most bytes before any boundary."""
        return max(self.before.values(), default=0) if self.always is None else self.always

    def peak(self, residents: Residents, early_share: float) -> int:
        """Return the most bytes before any boundary of a step, with its groups.

        Args:
            residents: bytes of groups on the device.
            early_share: of the early releases, how many recur.
        """
        if self.always is not None:
            return self.always + residents.most
        found = self._peaks.get((residents, early_share))
        if found is None:
            at = (self._with(boundary, nbytes, early_share) for boundary, nbytes in residents.before.items())
            found = self._peaks[residents, early_share] = max(at, default=0)
        return found

    def peak_boundary(self, residents: Mapping[Boundary, int]) -> Boundary | None:
        """Return the boundary before which the peak is; None if nothing was measured."""
        return max(residents, key=lambda boundary: self._with(boundary, residents[boundary], 0.0), default=None)

    def of_any_microbatch(self) -> OtherBytes:
        """Return the same for steps of a few of the measured microbatches: each may be like any of these."""

        def of_any(found: Mapping[Boundary | Moment, int]) -> dict[Boundary | Moment, int]:
            return {at: nbytes for at, nbytes in found.items() if not isinstance(at, Boundary)}

        return OtherBytes(of_any(self.before), of_any(self.early), self.always)

    def _with(self, boundary: Boundary, nbytes: int, early_share: float) -> int:
        at: Boundary | Moment = boundary if boundary in self.before else moment_of(boundary)
        other = self.before.get(at) if self.always is None else self.always
        return 0 if other is None else other + nbytes - round(early_share * self.early.get(at, 0))


def moment_of(boundary: Boundary) -> Moment:
    """Return the moment of a boundary, for any microbatch."""
    kind, chunk, index = boundary
    return kind, -1 if chunk is None else chunk.stage, index
