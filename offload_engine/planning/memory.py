# SPDX-License-Identifier: Apache-2.0
"""Predicts how much memory a step takes with other choices: one step is measured, and only the difference is modelled.

Bytes of groups that leave the device reduce its peak one for one. So the allocator's peak before each boundary, minus
the bytes of groups on the device, is the memory of everything else, whatever is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from offload_engine.planning.choices import Choice, Choices, slots_of
from offload_engine.planning.moves import Boundary
from offload_engine.planning.other_bytes import Moment, OtherBytes, moment_of
from offload_engine.planning.planner import plan_step
from offload_engine.planning.residents import Residents, residents_of
from offload_engine.planning.shapes import Bounds, Shapes
from offload_engine.schedule import Action

_WASTED_KEEPING: Final = 5 / 8
_WASTED_IN_PIPELINE: Final = 3 / 4
_WASTED_MOVING: Final = 8 / 10
"""Reserved but unused bytes of other steps, as shares of the floor's: if nothing moves; if nothing does, and several
chunks wait for their backward at once; and if something moves. (H200s: 0.60 to 0.64; on four ranks 0.4 to 2.0; of
thirteen decisions 0.4 to 1.0, eight of them 0.71 to 0.81.)"""
_WASTED_BEYOND: Final = 1 / 5
"""If nothing moves and several chunks wait: at least this share of what is allocated beyond the floor. Chunks are freed
in another order than they were allocated in. (Two ranks that had left little at the floor: 0.20 and 0.21.)"""
_MOST_WASTED: Final = 2
"""At most this many times the bytes that the floor reserves in vain: if it wastes nothing, later steps will not."""


class Excess(NamedTuple):
    """By how many bytes a step exceeded its prediction; negative if it held less."""

    allocated: int = 0
    wasted: int = 0
    """Bytes besides the peak of allocated bytes: reserved but unused, or outside the allocator."""

    @property
    def total(self) -> int:
        """Return the sum."""
        return self.allocated + self.wasted


class MeasuredBoundary(NamedTuple):
    """Measurements at a boundary, before its moves."""

    boundary: Boundary
    peak_bytes: int
    """Peak of allocated bytes since the previous boundary."""
    resident_bytes: int
    """Bytes of groups on the device."""


class MeasuredMemory(NamedTuple):
    """Measurements of one step in which everything was offloaded."""

    boundaries: tuple[MeasuredBoundary, ...]
    between_bytes: int
    """Peak of allocated bytes between this step and the next, for instance by an optimizer."""
    overhead_bytes: int
    """Bytes besides the peak of allocated bytes: reserved by the allocator but unused, or outside the allocator."""
    wasted_bytes: int = 0
    """The part of these that the allocator reserves."""


@dataclass(frozen=True)
class Job:
    """What one rank runs, and what it may keep."""

    actions: tuple[Action, ...]
    shapes: Shapes
    bounds: Bounds = Bounds()
    is_combined: bool = False

    def within(self, resident_bytes: int | None) -> Job:
        """Return the job under a budget of resident bytes; None: the same."""
        return self if resident_bytes is None else replace(self, bounds=Bounds(resident_bytes=resident_bytes))

    def residents(self, choices: Choices) -> Residents:
        """Return the bytes of groups on the device."""
        plan = plan_step(self.actions, self.shapes, self.bounds, choices=choices, is_combined=self.is_combined)
        return residents_of(self.actions, self.shapes, self.bounds, plan)


@dataclass(frozen=True)
class MemoryModel:
    """Predicts the most bytes that a process holds on its device."""

    others: OtherBytes
    """Of all else but groups. Early releases are scaled by the bytes that leave."""
    floor_bytes: int
    """Bytes of the groups that leave when everything is offloaded."""
    floor_moved_bytes: int = 0
    """Bytes copied out in a step in which everything is offloaded."""
    between_bytes: int = 0
    overhead_bytes: int = 0
    wasted_bytes: int = 0
    """See `MeasuredMemory`; steps that move less reserve less of it."""
    correction_bytes: int = 0
    """Allocated minus predicted bytes of later steps."""
    floor_peak_bytes: int = 0
    """Most bytes allocated if everything is offloaded."""
    is_pipeline: bool = False
    """Several chunks wait for their backward at once."""
    moving_share: float = _WASTED_MOVING
    """Share of `wasted_bytes` that steps reserve in vain which move something, but less than everything."""

    @property
    def has_groups_alone(self) -> bool:
        """Return whether the bytes of groups are all that the device reports; see `make_groups_model`."""
        return self.others.always is not None

    def early_share(self, job: Job, choices: Choices) -> float:
        """Return the share of early releases that recur: none has to where anything was chosen."""
        if job.bounds.resident_bytes is not None or choices or not self.floor_bytes:
            return 0.0
        return leaving_bytes(job.shapes, choices) / self.floor_bytes

    def correction_share(self, residents: Residents) -> float:
        """Return the share of the correction that applies: a negative one came from groups that left early."""
        if self.correction_bytes >= 0 or not self.floor_moved_bytes:
            return 1.0
        return min(1.0, residents.moved_bytes / self.floor_moved_bytes)

    def room_bytes(self, budget_bytes: int) -> int:
        """Return how many bytes groups may have at any boundary within a budget for the whole process."""
        return max(0, budget_bytes - self.others.most - self.overhead_bytes - self.correction_bytes)

    def held_with(self, residents: Residents, share: float, wasted_bytes: int | None = None) -> int:
        """Return the most bytes that the process holds.

        Args:
            residents: bytes of groups on the device.
            share: see `early_share`.
            wasted_bytes: see `overhead_with`.
        """
        overhead = self.overhead_with(residents, wasted_bytes)
        return self.allocated_with(residents, share) + overhead

    def allocated_with(self, residents: Residents, share: float) -> int:
        """Return the most bytes that are allocated at once; see `held_with` for the arguments."""
        correction = round(self.correction_share(residents) * self.correction_bytes)
        return max(self.others.peak(residents, share), self.between_bytes) + correction

    def overhead_with(self, residents: Residents, wasted_bytes: int | None = None) -> int:
        """Return how many bytes the process holds besides its peak of allocated bytes.

        Args:
            residents: bytes of groups on the device.
            wasted_bytes: of these, what the allocator reserves in vain; None: a share of what it did in the measured
                step.
        """
        wasted = self._wasted_with(residents) if wasted_bytes is None else wasted_bytes
        return self.overhead_bytes - self.wasted_bytes + wasted

    def _wasted_with(self, residents: Residents) -> int:
        if residents.moved_bytes >= self.floor_moved_bytes:
            return self.wasted_bytes  # as measured
        if residents.moved_bytes:
            return round(self.moving_share * self.wasted_bytes)
        if not self.is_pipeline:
            return round(_WASTED_KEEPING * self.wasted_bytes)
        beyond = round(_WASTED_BEYOND * (self.others.peak(residents, 0.0) - self.floor_peak_bytes))
        return max(round(_WASTED_IN_PIPELINE * self.wasted_bytes), min(beyond, _MOST_WASTED * self.wasted_bytes))

    def hoping(self, wasted_bytes: int | None) -> MemoryModel:
        """Return a model by which steps that move something reserve as much in vain as one that was replayed."""
        if wasted_bytes is None or not self.wasted_bytes:
            return self
        return replace(self, moving_share=wasted_bytes / self.wasted_bytes)

    def of_few(self, moved_bytes: int) -> MemoryModel:
        """Return the model for steps of a few of the measured microbatches: each may be like any of these.

        Args:
            moved_bytes: copied out in such a step, if everything is offloaded.
        """

        return replace(self, others=self.others.of_any_microbatch(), floor_moved_bytes=moved_bytes)

    def corrected(self, excess: Excess) -> MemoryModel:
        """Return the model corrected by a step that took `excess` more than predicted."""
        return replace(
            self,
            correction_bytes=self.correction_bytes + excess.allocated,
            overhead_bytes=self.overhead_bytes + excess.wasted,
        )


def make_memory_model(job: Job, measured: MeasuredMemory, *, is_early_certain: bool) -> MemoryModel:
    """Make the model from a step that was measured with everything offloaded.

    Args:
        job: the measured step.
        measured: its measurements.
        is_early_certain: a copy-out that was complete at a boundary will be complete there again.
    """
    every = job.residents(Choices())
    residents = every.before
    others: dict[Boundary | Moment, int] = {}
    early: dict[Boundary | Moment, int] = {}
    for boundary, other, resident in _merged(measured.boundaries, residents):
        spare = residents[boundary] - resident
        places: list[Boundary | Moment] = [boundary, moment_of(boundary)]
        for at in places:
            others[at] = max(others.get(at, other), other)
            if is_early_certain:
                early[at] = min(early.get(at, spare), spare)
    return _model_with(OtherBytes(others, early), job, measured, every)


def make_groups_model(job: Job, measured: MeasuredMemory) -> MemoryModel:
    """Make the model of a device that reports groups alone; see `make_memory_model`.

    Their bytes are known at any time. Of a peak that is measured, it could not be told which group it was of.
    """
    every = job.residents(Choices())
    peak = max((boundary.peak_bytes for boundary in measured.boundaries), default=0)
    return _model_with(OtherBytes({}, {}, always=max(0, peak - every.most)), job, measured, every)


def _model_with(others: OtherBytes, job: Job, measured: MeasuredMemory, every: Residents) -> MemoryModel:
    followed = zip(job.actions, job.actions[1:], strict=False)
    return MemoryModel(
        others,
        leaving_bytes(job.shapes, Choices()),
        floor_moved_bytes=every.moved_bytes,
        between_bytes=measured.between_bytes,
        overhead_bytes=measured.overhead_bytes,
        wasted_bytes=measured.wasted_bytes,
        floor_peak_bytes=max((boundary.peak_bytes for boundary in measured.boundaries), default=0),
        is_pipeline=any(first.kind == following.kind == "F" for first, following in followed),
    )


def leaving_bytes(shapes: Shapes, choices: Choices) -> int:
    """Add up the bytes of groups that may leave, one microbatch of each chunk."""
    return sum(
        group.nbytes
        for stage, shape in enumerate(shapes)
        for slot, group in zip(slots_of(stage, shape.groups), shape.groups, strict=True)
        if choices.of(slot) is not Choice.KEEP
    )


def _merged(measured: Sequence[MeasuredBoundary], known: Mapping[Boundary, int]) -> Iterable[tuple[Boundary, int, int]]:
    """Yield boundary, other bytes and resident bytes.

    Measurements at an unknown boundary are merged into the next, and so are those of a boundary that came again: the
    moves of the first time lie between, as where both the logits and the end of a forward report the head.
    """
    left = dict.fromkeys(known)
    other = 0
    for boundary, peak, resident in measured:
        other = max(other, peak - resident)
        if boundary in left:
            del left[boundary]
            yield boundary, other, resident
            other = 0
