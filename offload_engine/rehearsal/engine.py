# SPDX-License-Identifier: Apache-2.0
"""`RehearsalEngine`: an engine that notes the time and the allocated bytes at each boundary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from offload_engine._devices.base import Device
from offload_engine._observe.notes import ObservedGroup
from offload_engine._observe.recorder import Recorder
from offload_engine.config import OffloadConfig
from offload_engine.engine import OffloadEngine
from offload_engine.planning.moves import BoundaryKind
from offload_engine.rehearsal.device import RehearsalDevice
from offload_engine.schedule import Action, ChunkKey
from offload_engine.stats import IterationStats


class NotedGroup(NamedTuple):
    """State of a group at one of its boundaries."""

    number: int
    """Index of the group in its chunk."""
    name: str
    layer: int
    own_bytes: int
    is_kept: bool
    may_delay: bool


class NotedBoundary(NamedTuple):
    """A boundary, before its moves."""

    kind: BoundaryKind
    chunk: ChunkKey | None
    group: NotedGroup | None
    at_ms: float
    """Compute time since the step began."""
    peak_bytes: int
    """Peak of allocated bytes since the previous boundary."""
    resident_bytes: int
    """Bytes of groups on the device."""


_Note = Callable[[BoundaryKind, ChunkKey | None, NotedGroup | None], None]


class RehearsalEngine(OffloadEngine):
    """An engine on a `RehearsalDevice`, whose last step can be read.

    Args:
        config: see `OffloadEngine`; with `dry_run` nothing moves.
        device: its clocks are reset when a step begins.
        pipeline: rank and number of ranks.
    """

    def __init__(self, config: OffloadConfig, device: RehearsalDevice, pipeline: tuple[int, int] = (0, 1)) -> None:
        super().__init__(config, device, pipeline=pipeline, logs_first_step=False)
        self.boundaries: list[NotedBoundary] = []
        """The boundaries of the last step."""
        self.peak_bytes = 0
        """Peak of allocated bytes in the last step."""
        self.milliseconds = 0.0
        """Time of the last step, without waits for other ranks."""
        self._rehearsed = device

    def begin_iteration(
        self,
        actions: Sequence[Action] | None = None,
        weights: Iterable[torch.Tensor] = (),
        *,
        is_combined: bool = False,
    ) -> None:
        """Start a step; see `OffloadEngine.begin_iteration`."""
        self._rehearsed.clocks.begin_step()
        self.pool.reset()  # events of the last step are void, because its clocks are reset
        super().begin_iteration(actions, weights, is_combined=is_combined)
        self._rehearsed.allocated.reset_peak()
        self.boundaries, self.peak_bytes = [], 0
        self._store.context.recorder = _Log(self.device, self._note)

    def end_iteration(self) -> IterationStats:
        """End a step; see `OffloadEngine.end_iteration`."""
        stats = super().end_iteration()
        self.milliseconds = self._rehearsed.clocks.now.compute
        self.peak_bytes = max(self.peak_bytes, self._rehearsed.allocated.peak_bytes)
        return stats

    def _note(self, kind: BoundaryKind, chunk: ChunkKey | None, group: NotedGroup | None) -> None:
        """Note a boundary."""
        allocated = self._rehearsed.allocated
        self.peak_bytes = max(self.peak_bytes, allocated.peak_bytes)
        resident = self._store.counters.resident_bytes
        at_ms = self._rehearsed.clocks.now.compute
        self.boundaries.append(NotedBoundary(kind, chunk, group, at_ms, allocated.peak_bytes, resident))
        allocated.reset_peak()


class _Log(Recorder):
    """Passes on boundaries, and records nothing."""

    def __init__(self, device: Device, note: _Note) -> None:
        super().__init__(device)
        self._note_passed = note

    def note_boundary(self, kind: BoundaryKind, chunk: ChunkKey | None, group: ObservedGroup | None = None) -> None:
        """See `Recorder.note_boundary`."""
        noted = None if group is None else NotedGroup(
            group.index, group.name, group.layer, group.own_bytes, group.is_kept, getattr(group, "may_delay", False)
        )  # fmt: skip
        self._note_passed(kind, chunk, noted)
        super().note_boundary(kind, chunk, group)
