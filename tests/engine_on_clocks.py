# SPDX-License-Identifier: Apache-2.0
"""Runs the real engine on the clocks of the simulator, where kernels and copies only move clocks.

This is the cross-check of the simulator: the same jobs and clocks, but the engine decides, copies nothing, and may
follow any policy. A byte of the engine stands for a thousand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from offload_engine import ChunkKey, ChunkOffloadHandler, GroupTraits, IterationStats, OffloadConfig, OffloadEngine
from offload_engine.planning.clocks import Link
from offload_engine.planning.moves import HELD
from offload_engine.planning.shapes import ChunkShape
from offload_engine.planning.simulate import PipelineJob, RankJob
from offload_engine.rehearsal.allocated import AllocatedBytes
from offload_engine.rehearsal.device import RehearsalDevice, StepClocks
from offload_engine.schedule import Action, backward_at_once

SCALE = 1 << 10
"""How many bytes of a job one byte of the engine stands for."""
KIB = 1 << 10  # stands for a MiB


class ClockDevice(RehearsalDevice):
    """A rehearsal's device, of which a byte stands for `SCALE`."""

    host_alignment = 64

    def __init__(self, link: Link | None = None) -> None:
        super().__init__(StepClocks(link or Link()), AllocatedBytes(lambda _: None))

    @property
    def stalled(self) -> float:
        """Return how long compute has waited for copies, in ms."""
        return sum(self.clocks.now.stalled.values())

    def compute(self, milliseconds: float) -> None:
        """Launch kernels."""
        self.clocks.run(milliseconds, "")

    def milliseconds_between(self, first: Any, last: Any) -> float:
        self.synchronize(first)
        self.synchronize(last)
        return super().milliseconds_between(first, last)

    def copy_out(self, stream: str, copies: Sequence[tuple[torch.Tensor, Any]]) -> Any:
        self.copy(stream, sum(region.nbytes for _, region in copies))
        return self.record_event(stream)

    def copy_in(self, stream: str, copies: Sequence[tuple[Any, torch.Tensor]]) -> Any:
        self.copy(stream, sum(region.nbytes for region, _ in copies))
        return self.record_event(stream)

    def copy(self, stream: str, nbytes: int) -> None:
        """Issue a copy of `nbytes` of the engine."""
        clocks, copied = self.clocks.now, self.clocks.copied
        if stream == "copy_out":
            copied[stream] = clocks.copy_out(nbytes * SCALE, copied[stream], "")
        else:
            copied[stream] = clocks.copy_in(nbytes * SCALE, "")


Saved = tuple[Any, list[Any]]
"""A group of the engine, and the handles of what it saved."""


class EngineRank:
    """Runs the steps of one rank in an engine.

    Args:
        job: of the rank.
        link: of its device.
        is_combined: each forward runs together with the next backward.
        flags: of `OffloadConfig.from_flags`, besides the bounds of `job`.
    """

    def __init__(self, job: RankJob, link: Link, is_combined: bool = False, **flags: bool) -> None:
        limits = {name: getattr(job.bounds, name) for name in ("horizon_bytes", "max_inflight_bytes", "resident_bytes")}
        scaled = {name: limit // SCALE for name, limit in limits.items() if limit is not None}
        self.job = job
        self.device = ClockDevice(link)
        self.engine = OffloadEngine(OffloadConfig.from_flags(min_tensor_bytes=1, **scaled, **flags), self.device)
        self.engine.pool._slab_bytes //= SCALE
        self._is_combined = is_combined
        self._at_once = backward_at_once(job.actions, is_combined)
        self._chunks: dict[ChunkKey, tuple[ChunkOffloadHandler, list[Saved]]] = {}
        self._running: dict[ChunkKey, ChunkOffloadHandler] = {}  # forwards that a backward runs together with

    def begin_step(self) -> None:
        self.device.clocks.begin_step()
        self.engine.pool.reset()  # of the step before, whose clocks have been set back
        self.engine.begin_iteration(self.job.actions, is_combined=self._is_combined)

    def run(self, action: Action) -> None:
        """Run the forward or the backward of a chunk."""
        kind, key = action
        for running in [key] if kind == "B" else list(self._running):
            if running in self._running:
                self._running.pop(running).end_forward()
        if kind == "B":
            self._backward(key, *self._chunks.pop(key))
            return
        self._chunks[key] = self._forward(key)
        self._running[key] = self._chunks[key][0]
        if not self._is_combined:
            self._running.pop(key).end_forward()

    def _forward(self, key: ChunkKey) -> tuple[ChunkOffloadHandler, list[Saved]]:
        shape, is_at_once = self.job.shapes[key.stage], key in self._at_once
        kept = shape.kept_at_once() if is_at_once else frozenset()
        chunk = self.engine.start_chunk(key, has_head=shape.has_head and is_at_once)
        self._mark(chunk, shape, 0)
        saved: list[Saved] = []
        for index, group in enumerate(shape.groups):
            self.device.compute(group.lead_ms)
            is_kept = index in kept or (is_at_once and group.unkeep_count is not None)
            traits = GroupTraits(keep=is_kept, layer=group.layer, may_delay=group.may_delay)
            opened = chunk.open_group(group.name, traits)
            nbytes = group.nbytes // SCALE
            handles = [chunk.tensor_push(torch.empty(nbytes, dtype=torch.uint8))] if nbytes else []
            self.device.compute(group.forward_ms)
            chunk.close_group()
            saved.append((opened, handles))
            self._mark(chunk, shape, index + 1)
        self.device.compute(shape.rest_ms)
        if shape.has_head:
            chunk.begin_head()
            self.device.compute(shape.head_ms)
        return chunk, saved

    def _mark(self, chunk: ChunkOffloadHandler, shape: ChunkShape, num_committed: int) -> None:
        if num_committed in shape.launch_counts:
            chunk.note_launch()
        if num_committed in shape.held_counts:
            self.engine._executor.at(HELD, chunk.groups.progress)
        for group in shape.groups:
            if group.unkeep_count == num_committed:
                chunk.offload_kept_groups(group.name)
        if num_committed == shape.tail_index:
            chunk.begin_tail(torch.zeros(1, requires_grad=True) if shape.has_tail_end else None)

    def _backward(self, key: ChunkKey, chunk: ChunkOffloadHandler, saved: list[Saved]) -> None:
        shape = self.job.shapes[key.stage]
        if not self._is_combined:
            chunk.begin_backward()
        if shape.has_head:
            self.device.compute(shape.head_backward_ms)
            chunk.end_loss()
        self.device.compute(shape.rest_backward_ms)
        for group_shape in reversed(shape.groups):
            group, handles = saved.pop()
            chunk.on_group_commit_backward(group)
            tensors = self.unpack(chunk, group, handles)
            self.device.compute(group_shape.backward_ms)
            del tensors, handles
            if len(saved) == shape.tail_index:
                chunk._end_tail()
            self.device.compute(group_shape.lead_backward_ms)

    def unpack(self, chunk: ChunkOffloadHandler, group: Any, handles: list[Any]) -> list[torch.Tensor]:
        """Unpack what a group saved, when its backward begins."""
        return [chunk.tensor_pop(handle) for handle in handles]


class Outcome(NamedTuple):
    """A step of the engine."""

    milliseconds: float
    stalled: list[float]
    """Of each rank: how long its compute waited for copies."""
    stats: list[IterationStats]


def run_engine(job: PipelineJob, num_steps: int = 2, **flags: bool) -> Outcome:
    """Run steps of all ranks, of which the last counts; `flags` as for `EngineRank`."""
    ranks = [EngineRank(rank, job.link, **flags) for rank in job.ranks]
    for _ in range(num_steps):
        stats = _run_step(ranks)
    outcome = Outcome(max(rank.device.clocks.now.compute for rank in ranks), [r.device.stalled for r in ranks], stats)
    for rank in ranks:
        rank.engine.close()
    return outcome


_Over = dict[tuple[str, int, int], float]
"""When the forward or backward of a stage for a microbatch was over, on any rank."""


def _run_step(ranks: Sequence[EngineRank]) -> list[IterationStats]:
    over: _Over = {}
    last_stage = sum(len(rank.job.shapes) for rank in ranks) - 1
    running, num_over = [_run_rank(rank, index, len(ranks), last_stage, over) for index, rank in enumerate(ranks)], -1
    while running:
        assert len(over) > num_over, "the ranks wait for each other"
        num_over = len(over)
        running = [actions for actions in running if next(actions, None) is not None]
    return [rank.engine.end_iteration() for rank in ranks]


def _run_rank(rank: EngineRank, index: int, num_ranks: int, last_stage: int, over: _Over) -> Iterator[bool]:
    """Run all actions of a rank; yields while another one has to go on first."""
    rank.begin_step()
    for action in rank.job.actions:
        stage, microbatch = action.chunk.stage * num_ranks + index, action.chunk.microbatch
        before = (action.kind, stage - 1 if action.kind == "F" else stage + 1, microbatch)
        if 0 <= before[1] <= last_stage:
            while before not in over:
                yield True
            rank.device.clocks.now.receive(over[before])
        rank.run(action)
        over[action.kind, stage, microbatch] = rank.device.clocks.now.compute
