# SPDX-License-Identifier: Apache-2.0
"""The planned moves against those that the engine's policies take: the same at each boundary, whatever the link."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from offload_engine import IS_COMPILED, ChunkOffloadHandler
from offload_engine.planning.clocks import Link
from offload_engine.planning.moves import (
    BACKWARD,
    BACKWARD_END,
    DROP,
    HELD,
    IN,
    LAUNCH,
    OUT,
    Boundary,
    BoundaryKind,
    GroupKey,
    PlannedMove,
)
from offload_engine.planning.plan import Line, Plan, diff_plans, make_plan
from offload_engine.planning.planner import plan_step
from offload_engine.planning.shapes import Bounds
from offload_engine.planning.simulate import RankJob
from tests.cpu.test_planner import PLANS, Golden
from tests.dense_jobs import MIB
from tests.engine_on_clocks import EngineRank

pytestmark = pytest.mark.skipif(IS_COMPILED, reason="a compiled policy cannot be wrapped: needs the pure Python core")

LINKS = {"fast": 1e6, "as it is": 50.0, "slow": 5.0}
BOUNDS = [
    Bounds(),
    Bounds(horizon_bytes=0),
    Bounds(horizon_bytes=300 * MIB),
    Bounds(horizon_bytes=2000 * MIB),
    Bounds(max_inflight_bytes=1300 * MIB),
]


class RecordingRank(EngineRank):
    """Records the moves of the engine's policy."""

    def __init__(self, job: RankJob, link: Link, is_combined: bool, **flags: bool) -> None:
        super().__init__(job, link, is_combined, **flags)
        self.moves: dict[Boundary, list[PlannedMove]] = {}
        self.engine._executor.policy.at = self._recording(self.engine._executor.policy.at)  # type: ignore[method-assign]

    def record(self) -> Plan:
        """Return the moves of a second step: those of groups that were away, each once."""
        for _ in range(2):
            self.moves.clear()
            self.begin_step()
            for action in self.job.actions:
                self.run(action)
            self.engine.end_iteration()
        self.engine.close()
        away: set[GroupKey] = set()
        lines = {boundary: [move for move in moves if _counts(move, away)] for boundary, moves in self.moves.items()}
        return Plan(tuple(Line(boundary, tuple(moves)) for boundary, moves in lines.items() if moves))

    def unpack(self, chunk: ChunkOffloadHandler, group: Any, handles: list[Any]) -> list[torch.Tensor]:
        """See `EngineRank`; records that a group is recalled which is still leaving."""
        if group.leaving_bytes:
            own = GroupKey(group.chunk, group.index)
            self.moves.setdefault(Boundary(BACKWARD, *own), []).append(PlannedMove(IN, own))
        return super().unpack(chunk, group, handles)

    def _recording(self, at: Callable[..., Iterable[Any]]) -> Callable[..., Iterator[Any]]:
        def record(kind: BoundaryKind, chunk: Any, group: Any) -> Iterator[Any]:
            index = len(chunk.groups) if kind in (HELD, LAUNCH) else -1 if group is None else group.index
            index = chunk.tail_index if kind is BACKWARD_END else index
            boundary = Boundary(kind, None if chunk is None else chunk.key, index)
            for move in at(kind, chunk, group):
                op, moved = move
                self.moves.setdefault(boundary, []).append(PlannedMove(op, GroupKey(moved.chunk, moved.index)))
                yield move

        return record


def _counts(move: PlannedMove, away: set[GroupKey]) -> bool:
    """Tell whether a move does something: OUT of what is here, IN of what is away. Releases depend on the link."""
    if move.op is OUT:
        away.add(move.group)
    elif move.op is IN and move.group in away:
        away.remove(move.group)
        return True
    return move.op is OUT


def copies_of(plan: Plan) -> Plan:
    """Return a plan without its releases."""
    return make_plan(Line(line.boundary, tuple(m for m in line.moves if m.op is not DROP)) for line in plan.lines)


@pytest.mark.parametrize("gbps", LINKS.values(), ids=LINKS)
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize(
    "golden",
    [golden for golden in PLANS if golden.bounds == Bounds()],
    ids=lambda golden: golden.file.stem.removeprefix("plan_"),
)
def test_policies_make_the_planned_moves(golden: Golden, bounds: Bounds, gbps: float) -> None:
    shape = golden.shape
    if golden.contents in ("experts", "shared", "single") and bounds.max_inflight_bytes and shape.pp > 1:
        pytest.skip("no plan knows which groups a bound has not released: they are recalled early, and end all delays")
    for rank in range(shape.pp):
        job = RankJob(tuple(shape.actions(rank)), golden.shapes(rank), bounds)
        plan = plan_step(job.actions, job.shapes, bounds, is_combined=shape.overlap)
        assert diff_plans(copies_of(plan), RecordingRank(job, Link(gbps, gbps), shape.overlap).record()) == ""


@pytest.mark.parametrize("golden", PLANS, ids=lambda golden: golden.file.stem.removeprefix("plan_"))
def test_the_policy_that_follows_a_plan_makes_its_moves_and_each_once(golden: Golden) -> None:
    for rank in range(golden.shape.pp):
        job = RankJob(tuple(golden.shape.actions(rank)), golden.shapes(rank), golden.bounds)
        made = RecordingRank(job, Link(1e6, 1e6), golden.shape.overlap, planned=True).record()
        assert diff_plans(copies_of(golden.plan(rank)), made) == ""
