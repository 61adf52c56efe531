"""The planned moves against those that the engine's policies take: the same at each boundary, whatever the link."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from offload_engine import IS_COMPILED, ChunkKey, ChunkOffloadHandler, GroupTraits, OffloadConfig, OffloadEngine
from offload_engine.planning.moves import BACKWARD, DROP, IN, LAUNCH, OUT, Boundary, BoundaryKind, GroupKey, PlannedMove
from offload_engine.planning.plan import Line, Plan, diff_plans
from offload_engine.planning.planner import plan_step
from offload_engine.planning.shapes import Bounds, ChunkShape
from offload_engine.schedule import backward_at_once
from tests.cpu.test_planner import shapes_of
from tests.cpu.test_schedule import GOLDEN, Shape
from tests.virtual_time import KIB, MIB, VirtualDevice

pytestmark = pytest.mark.skipif(IS_COMPILED, reason="a compiled policy cannot be wrapped: needs the pure Python core")

LINKS = {"fast": 1e6, "as it is": 50.0, "slow": 5.0}
BOUNDS = [
    Bounds(),
    Bounds(horizon_bytes=0),
    Bounds(horizon_bytes=300 * MIB),
    Bounds(horizon_bytes=2000 * MIB),
    Bounds(max_inflight_bytes=1300 * MIB),
]


class Recorder:
    """Runs steps of one rank in an engine, and records the moves of its policy. Bytes are a thousandth."""

    def __init__(self, shape: Shape, rank: int, bounds: Bounds, gbps: float) -> None:
        sizes = {name: getattr(bounds, name) for name in ("horizon_bytes", "max_inflight_bytes")}
        scaled = {name: None if size is None else size * KIB // MIB for name, size in sizes.items()}
        self.actions = shape.actions(rank)
        self.shapes = shapes_of(shape, rank)
        self.is_combined = shape.overlap
        self.device = VirtualDevice(gbps, gbps)
        self.engine = OffloadEngine(OffloadConfig.from_flags(min_tensor_bytes=1, **scaled), self.device)  # type: ignore[arg-type]
        self.at_once = backward_at_once(self.actions, self.is_combined)
        self.moves: dict[Boundary, list[PlannedMove]] = {}
        self.engine._executor.policy.at = self._recording(self.engine._executor.policy.at)  # type: ignore[method-assign]

    def record(self) -> Plan:
        """The moves of a second step: those of groups that were away, each once."""
        for _ in range(2):
            self.moves.clear()
            self.device.begin_step()
            self.engine.pool.take_all_back()
            self._run()
        self.engine.close()
        away: set[GroupKey] = set()
        lines = {boundary: [move for move in moves if _counts(move, away)] for boundary, moves in self.moves.items()}
        return Plan(tuple(Line(boundary, tuple(moves)) for boundary, moves in lines.items() if moves))

    def _recording(self, at: Callable[..., Iterable[Any]]) -> Callable[..., Iterator[Any]]:
        def record(kind: BoundaryKind, chunk: Any, group: Any) -> Iterator[Any]:
            index = len(chunk.groups) if kind is LAUNCH else -1 if group is None else group.index
            boundary = Boundary(kind, None if chunk is None else chunk.key, index)
            for move in at(kind, chunk, group):
                op, moved = move
                self.moves.setdefault(boundary, []).append(PlannedMove(op, GroupKey(moved.chunk, moved.index)))
                yield move

        return record

    def _run(self) -> None:
        self.engine.begin_iteration(self.actions, is_combined=self.is_combined)
        chunks: dict[ChunkKey, tuple[ChunkOffloadHandler, list[Any]]] = {}
        running: list[ChunkOffloadHandler] = []  # forwards that a backward runs together with
        for (kind, key), following in zip(self.actions, [*self.actions[1:], None], strict=True):
            if kind == "F":
                while running:
                    running.pop().end_forward()
                chunks[key] = self._forward(key)
                if self.is_combined and following and following.kind == "B" and following.chunk != key:
                    running.append(chunks[key][0])
                else:
                    chunks[key][0].end_forward()
            else:
                self._backward(key, *chunks.pop(key))
        self.engine.end_iteration()

    def _forward(self, key: ChunkKey) -> tuple[ChunkOffloadHandler, list[Any]]:
        shape, is_at_once = self.shapes[key.stage], key in self.at_once
        kept = shape.kept_at_once() if is_at_once else frozenset()
        chunk = self.engine.start_chunk(key, has_head=shape.has_head and is_at_once)
        self._marks(chunk, shape, 0)
        saved = []
        for index, group in enumerate(shape.groups):
            traits = GroupTraits(keep=index in kept, layer=group.layer, may_delay=group.may_delay)
            opened = chunk.open_group(group.name, traits)
            handle = chunk.tensor_push(torch.empty(group.nbytes * KIB // MIB, dtype=torch.uint8))
            self.device.compute(1.0)
            chunk.close_group()
            saved.append((opened, handle))
            self._marks(chunk, shape, index + 1)
        if shape.has_head:
            chunk.begin_head()
            self.device.compute(1.0)
        return chunk, saved

    def _marks(self, chunk: ChunkOffloadHandler, shape: ChunkShape, num_committed: int) -> None:
        if num_committed in shape.launch_counts:
            chunk.pass_host_wait()
        if num_committed == shape.tail_index:
            chunk.begin_tail()

    def _backward(self, key: ChunkKey, chunk: ChunkOffloadHandler, saved: list[Any]) -> None:
        if not self.is_combined:
            chunk.begin_backward()
        if self.shapes[key.stage].has_head:
            self.device.compute(2.0)
            chunk.end_loss()
        while saved:
            group, handle = saved.pop()
            chunk.on_group_commit_backward(group)
            if group.leaving_bytes:  # the unpack recalls it
                own = GroupKey(key, group.index)
                self.moves.setdefault(Boundary(BACKWARD, *own), []).append(PlannedMove(IN, own))
            tensor = chunk.tensor_pop(handle)
            self.device.compute(2.0)
            del tensor, handle


def _counts(move: PlannedMove, away: set[GroupKey]) -> bool:
    """Whether a move does something: OUT of what is here, IN of what is away. Releases depend on the link."""
    if move.op is OUT:
        away.add(move.group)
    elif move.op is IN and move.group in away:
        away.remove(move.group)
        return True
    return move.op is OUT


@pytest.mark.parametrize("gbps", LINKS.values(), ids=LINKS)
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", GOLDEN, ids=lambda shape: shape.name)
def test_policies_move_what_is_planned(shape: Shape, bounds: Bounds, gbps: float) -> None:
    for rank in range(shape.pp):
        recorder = Recorder(shape, rank, bounds, gbps)
        plan = plan_step(recorder.actions, recorder.shapes, bounds, is_combined=shape.overlap)
        moves = ((line, tuple(move for move in line.moves if move.op is not DROP)) for line in plan.lines)
        planned = Plan(tuple(Line(line.boundary, copies) for line, copies in moves if copies))
        assert diff_plans(planned, recorder.record()) == ""
