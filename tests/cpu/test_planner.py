# SPDX-License-Identifier: Apache-2.0
"""The planner: the plan of every schedule of the golden files, and what holds of every plan.

`python -m tests.cpu.test_planner` writes the golden plans again. Read the difference before you commit it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_engine import IS_COMPILED, ChunkOffloadHandler
from offload_engine.planning.choices import Choices, slots_of
from offload_engine.planning.clocks import Link
from offload_engine.planning.moves import (
    BACKWARD,
    BACKWARD_END,
    DROP,
    HELD,
    IN,
    ITERATION_END,
    LAUNCH,
    OUT,
    Boundary,
    BoundaryKind,
    GroupKey,
    PlannedMove,
)
from offload_engine.planning.plan import Line, Plan, diff_plans, format_plan, make_plan, parse_plan, validate_plan
from offload_engine.planning.planner import PASSES, Planner, plan_step
from offload_engine.planning.shapes import Bounds, ChunkShape, GroupShape, Shapes, group_keys, step_boundaries
from offload_engine.planning.simulate import RankJob
from offload_engine.schedule import (
    Action,
    ChunkKey,
    interleaved,
    no_pipelining,
    one_forward_one_backward,
    parse_actions,
)
from tests.cpu.test_schedule import ARTIFACTS, GOLDEN, Shape
from tests.dense_jobs import MIB, chunk_shape
from tests.engine_on_clocks import EngineRank

DENSE = ("core_attn", "mlp_fc1")
# A layer with experts in each of two layers, under the all-to-all overlap: no chunk is called, so no tail and no head.
EXPERTS = ChunkShape(
    tuple(
        GroupShape(name, layer, mib * MIB, forward_ms=1.0, backward_ms=2.0, may_delay=may_delay)
        for layer in range(2)
        for name, mib, may_delay in (("core_attn", 100, True), ("expert_fc1", 400, False))
    ),
    launch_counts=(2, 4),
)


def _two_layers(has_head: bool) -> ChunkShape:
    return chunk_shape(DENSE, 2, has_head)


class Golden(NamedTuple):
    """A file with the plans of all ranks."""

    shape: Shape
    contents: str = ""  # of each chunk; "": two layers, with experts under the overlap
    make: Callable[[bool], ChunkShape] = _two_layers  # of whether the chunk has the head: the last of the last stage
    bounds: Bounds = Bounds()

    @property
    def file(self) -> Path:
        name = "_".join(part for part in ("plan", self.contents, self.shape.name) if part)
        return ARTIFACTS / f"{name}.txt"

    def shapes(self, rank: int) -> Shapes:
        num_virtual = self.shape.vpp or 1
        if self.shape.overlap and not self.contents:
            return (EXPERTS,) * num_virtual
        return tuple(self.make(rank == self.shape.pp - 1 and stage == num_virtual - 1) for stage in range(num_virtual))

    def plan(self, rank: int) -> Plan:
        return plan_step(self.shape.actions(rank), self.shapes(rank), self.bounds, is_combined=self.shape.overlap)


def _inputs_of_checkpoints(has_head: bool) -> ChunkShape:
    """Full recomputation of three layers: a group is the input of one; that of the last is kept by its index."""
    groups = tuple(GroupShape("layer_input", nbytes=64 * MIB, keep=layer == 2) for layer in range(3))
    return ChunkShape(groups, has_head=has_head)


def _experts(has_head: bool) -> ChunkShape:
    """Layers of experts that are called one by one, so that the last has a tail."""
    return replace(EXPERTS, launch_counts=(1, 3), tail_index=3, has_head=has_head, held_counts=(2, 4))


def _with_a_shared_module(has_head: bool) -> ChunkShape:
    """The module `shared` runs in both layers; only its second run is the last."""
    first = GroupShape("shared", 0, 50 * MIB, 10.0, 20.0, unkeep_count=3)
    attention = GroupShape("core_attn", 0, 100 * MIB, 10.0, 20.0, may_delay=True)
    mlp = GroupShape("mlp", 0, 400 * MIB, 10.0, 20.0)
    last = GroupShape("shared", 1, 50 * MIB, 10.0, 20.0, keep=True)
    return ChunkShape((first, mlp, attention, last), num_layers=1 << 30, has_head=has_head)


ONE, TWO, VIRTUAL = Shape(1, None, 1), Shape(2, None, 5), Shape(2, 2, 4)
WITH_BUDGET = (Shape(1, None, 4), TWO, VIRTUAL, Shape(2, 2, 6, overlap=True))
PLANS = [
    *(Golden(shape) for shape in GOLDEN),
    *(Golden(shape, "recompute", _inputs_of_checkpoints) for shape in (ONE, TWO, VIRTUAL)),
    *(Golden(shape, "layer", lambda head: chunk_shape(DENSE, 1, head)) for shape in (ONE, TWO, Shape(4, 2, 8))),
    *(Golden(shape, "headless", lambda _: _two_layers(False)) for shape in (Shape(1, None, 4), VIRTUAL)),
    *(Golden(shape, "single", lambda head: chunk_shape(("mlp_fc1",), 3, head)) for shape in (ONE, TWO, VIRTUAL)),
    *(Golden(shape, "experts", _experts) for shape in (ONE, TWO, VIRTUAL)),
    *(Golden(shape, "shared", _with_a_shared_module) for shape in (ONE, TWO)),
    *(Golden(shape, "budget", _two_layers, Bounds(resident_bytes=1000 * MIB)) for shape in WITH_BUDGET),
    Golden(VIRTUAL, "horizon", _two_layers, Bounds(horizon_bytes=1000 * MIB)),
    Golden(VIRTUAL, "inflight", _two_layers, Bounds(max_inflight_bytes=1000 * MIB)),
]


def write_golden_files() -> None:
    for golden in PLANS:
        texts = [f"# rank {rank}\n{format_plan(golden.plan(rank))}" for rank in range(golden.shape.pp)]
        golden.file.write_text("\n".join(texts))


@pytest.mark.parametrize("golden", PLANS, ids=lambda golden: golden.file.stem[5:])
def test_golden(golden: Golden) -> None:
    texts = golden.file.read_text().split("\n\n")
    assert len(texts) == golden.shape.pp
    for rank, text in enumerate(texts):
        plan, known = golden.plan(rank), parse_plan(text)
        validate_plan(known, golden.shape.actions(rank), golden.shapes(rank))
        assert diff_plans(known, plan) == ""
        assert text.strip() == f"# rank {rank}\n{format_plan(plan)}".strip()


def layers(num_layers: int, *names: str, nbytes: int = 1, may_delay: bool = False) -> tuple[GroupShape, ...]:
    return tuple(GroupShape(name, layer, nbytes, may_delay=may_delay) for layer in range(num_layers) for name in names)


def lines_of(plan: Plan) -> list[str]:
    return [" ".join(line.split()) for line in format_plan(plan).splitlines()]


def test_no_more_than_half_of_what_may_be_in_flight_is_delayed_and_nothing_under_a_budget() -> None:
    shape, actions = ChunkShape(layers(3, "attention", nbytes=2, may_delay=True)), parse_actions("F0.0 F0.1 B0.0 B0.1")
    skip = [each.__name__ for each in PASSES if each.__name__ not in ("everything_leaves", "delay_before_experts")]
    assert lines_of(plan_step(actions, (shape,), skip=skip))[:2] == ["F0.0:1 OUT 0.0:0 0.0:1", "F0.0:end OUT 0.0:2"]
    plan, without = (
        plan_step(actions, (shape,), Bounds(resident_bytes=4), skip=skip) for skip in ((), ("delay_before_experts",))
    )
    assert plan == without
    with pytest.raises(ValueError, match="skip names 'keep'; the passes are everything_leaves, keep_turn_around"):
        plan_step(actions, (shape,), skip=("keep",))


def test_leaving_groups_may_be_recalled_within_a_quarter_of_the_budget() -> None:
    """Else the forward behind would release its own groups, each as soon as its copy-out is issued."""
    shape, actions = ChunkShape(layers(4, "attention", "mlp")), parse_actions("F0.0 F0.1 B0.0 B0.1")
    tight = lines_of(plan_step(actions, (shape,), Bounds(resident_bytes=10)))
    assert [line for line in tight if "DROP" in line][:2] == ["F0.1:1 DROP 0.0:0", "F0.1:2 DROP 0.0:1"]
    assert lines_of(plan_step(actions, (shape,), Bounds(resident_bytes=17))) == [], "it fits"


def test_plans_are_memoised_by_their_inputs() -> None:
    planner, actions, shapes = Planner(max_plans=2), no_pipelining(1), (ChunkShape(layers(2, "attention")),)
    first = planner.plan_step(actions, shapes)
    changes: list[dict[str, Any]] = [{"bounds": Bounds(resident_bytes=9)}, {"is_combined": True}]
    changes += [{"choices": Choices(frozenset(slots_of(0, shapes[0].groups)))}]
    for change in changes:
        other = planner.plan_step(actions, shapes, **change)  # forgets that of before
        assert planner.plan_step(actions, tuple(shapes), **change) is other
        assert planner.plan_step(actions, shapes) is first is not other
    for num_microbatches in (2, 3):
        assert planner.plan_step(no_pipelining(num_microbatches), shapes) != first
    assert planner.plan_step(actions, shapes) is not first, "two others were asked for since"
    with pytest.raises(ValueError, match="max_plans must be at least 1"):
        Planner(0)


SIZES = st.integers(0, 5)
CHUNKS = st.builds(
    lambda sizes, has_head, marks: ChunkShape(
        tuple(GroupShape("ab"[i % 2], i // 2, size, may_delay=i % 2 == 0) for i, size in enumerate(sizes)),
        tail_index=marks % (len(sizes) + 1) if marks % 3 else None,
        launch_counts=tuple(range(2, len(sizes) + 1, 2)) if marks % 2 else (),
        has_head=has_head,
    ),
    st.lists(SIZES, max_size=7),
    st.booleans(),
    st.integers(0, 30),
)
BOUNDS = st.one_of(
    st.builds(
        Bounds,
        horizon_bytes=st.one_of(st.none(), st.integers(0, 12)),
        max_inflight_bytes=st.one_of(st.none(), st.integers(0, 12)),
    ),
    st.builds(Bounds, resident_bytes=st.integers(0, 40)),
)
SCHEDULES = st.one_of(
    st.builds(no_pipelining, st.integers(1, 4), st.booleans()),
    st.builds(one_forward_one_backward, st.just(3), st.integers(0, 2), st.integers(1, 5)),
    st.builds(interleaved, st.just(2), st.integers(0, 1), st.just(2), st.sampled_from([2, 4, 6])),
)


@settings(deadline=None, derandomize=True, database=None, max_examples=300)
@given(SCHEDULES, CHUNKS, BOUNDS, st.booleans(), st.sets(st.sampled_from([each.__name__ for each in PASSES])))
def test_every_plan_is_valid(
    actions: list[Action], shape: ChunkShape, bounds: Bounds, is_combined: bool, skip: set[str]
) -> None:
    shapes = (shape, shape)
    plan = plan_step(actions, shapes, bounds, is_combined=is_combined, skip=skip)
    validate_plan(plan, actions, shapes)
    assert sum(move.op is IN for _, move in plan.moves()) == sum(move.op is OUT for _, move in plan.moves())


ACTIONS = parse_actions("F0.0 F0.1 B0.0 B0.1")
SHAPES = (ChunkShape((GroupShape("attention"), GroupShape("mlp")), tail_index=1, launch_counts=(2,), has_head=True),)

KEYS = st.builds(ChunkKey, st.integers(0, 12), st.integers(0, 300))
GROUPS = st.builds(GroupKey, KEYS, st.integers(0, 99))
WITH_INDEX = [kind for kind in BoundaryKind if "{i}" in kind.value]
WITHOUT_INDEX = [kind for kind in BoundaryKind if kind not in WITH_INDEX and kind is not ITERATION_END]
RANDOM_BOUNDARIES = st.one_of(
    st.builds(Boundary, st.sampled_from(WITH_INDEX), KEYS, st.integers(0, 99)),
    st.builds(Boundary, st.sampled_from(WITHOUT_INDEX), KEYS, st.just(-1)),
    st.just(Boundary(ITERATION_END)),
)
RANDOM_MOVES = st.lists(st.builds(PlannedMove, st.sampled_from([OUT, DROP, IN]), GROUPS), min_size=1, max_size=5)
RANDOM_PLANS = st.dictionaries(RANDOM_BOUNDARIES, RANDOM_MOVES, max_size=8).map(
    lambda lines: Plan(tuple(Line(boundary, tuple(moves)) for boundary, moves in lines.items()))
)


@settings(deadline=None, derandomize=True, database=None)
@given(RANDOM_PLANS)
def test_parse_is_the_inverse_of_format(plan: Plan) -> None:
    assert parse_plan(format_plan(plan)) == plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # No plan.
        ("F0.0:0 OUT 0.0:0 / F0.x OUT 0.0:1", "line 2: not a boundary: 'F0.x'"),
        ("# none / F0.0:0 OUT 0.0", "line 2: not a group: '0.0'"),
        ("F0.0:0 0.0:0", "line 1: expected one of OUT, DROP, IN after F0.0:0, got '0.0:0'"),
        ("F0.0:0", "line 1: F0.0:0 without a move"),
        ("F0.0:0 OUT", "line 1: OUT without a group"),
        ("F0.0:0 OUT 0.0:0 / # again / F0.0:0 OUT 0.0:0", "line 3: F0.0:0 has a line already"),
        # None that a step can follow.
        ("F0.0:0 OUT 0.0:0", "line 1 (F0.0:0): OUT 0.0:0: nothing brings it back"),
        ("F0.0:0 OUT 0.0:1 / B0.0:1 IN 0.0:1", "line 1 (F0.0:0): OUT 0.0:1: it has not committed"),
        ("B0.0:1 IN 0.0:1", "line 1 (B0.0:1): IN 0.0:1: it has not left"),
        ("F0.0:0 OUT 0.0:0 / F0.0:1 OUT 0.0:0", "line 2 (F0.0:1): OUT 0.0:0: it has left before and not come back"),
        ("F0.0:1 DROP 0.0:0", "line 1 (F0.0:1): DROP 0.0:0: it has not left"),
        ("F0.0:0 OUT 0.0:0 / F0.0:1 DROP 0.0:0 / F0.1 DROP 0.0:0", "line 3 (F0.1): DROP 0.0:0: it has been released"),
        ("F0.0:1 OUT 0.0:1 / B0.0:0 IN 0.0:1", "line 2 (B0.0:0): IN 0.0:1: its backward has begun before"),
        ("B0.0:0 OUT 0.0:1", "line 1 (B0.0:0): OUT 0.0:1: its backward has begun before"),
        ("F0.0:2 OUT 0.0:2", "line 1 (F0.0:2): OUT 0.0:2: the step has no such boundary"),
        ("F0.0:1 OUT 0.0:2", "line 1 (F0.0:1): OUT 0.0:2: the step has no such group"),
        ("F0.1:0 OUT 0.1:0 / F0.0:1 OUT 0.0:1", "line 2 (F0.0:1): OUT 0.0:1: the boundary comes before that of the"),
    ],
)
def test_text_that_is_no_plan_or_none_that_a_step_can_follow(text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        validate_plan(parse_plan(text.replace(" / ", "\n")), ACTIONS, SHAPES)
    assert str(error.value).startswith(message)


def test_differences_name_moves_and_both_places() -> None:
    a = parse_plan("F0.0:0 OUT 0.0:0\nF0.0:1 OUT 0.0:1\nB0.0:1 IN 0.0:1\nB0.0:0 IN 0.0:0")
    b = parse_plan("F0.0:launch2 OUT 0.0:0 0.0:1\nB0.0:1 IN 0.0:1 0.0:0\nB0.0:0 DROP 0.0:0")
    assert diff_plans(a, b).splitlines() == [
        "OUT 0.0:0    F0.0:0 -> F0.0:launch2",
        "OUT 0.0:1    F0.0:1 -> F0.0:launch2",
        "IN 0.0:0     B0.0:0 -> B0.0:1",
        "DROP 0.0:0   none -> B0.0:0",
    ]
    a, b = (parse_plan(f"F0.0:1 OUT {moves}") for moves in ("0.0:0 0.0:1", "0.0:1 0.0:0"))
    assert diff_plans(a, b).startswith("F0.0:1: order of moves: ") and diff_plans(a, a) == ""


def test_boundaries_of_a_step_in_order() -> None:
    assert " ".join(map(str, step_boundaries(parse_actions("F0.0 B0.0"), SHAPES))) == (
        "F0.0 F0.0:0 F0.0:tail F0.0:1 F0.0:launch2 F0.0:head F0.0:end "
        "B0.0 B0.0:loss B0.0:1 B0.0:1/end B0.0:0 B0.0:0/end end"
    )
    early = (ChunkShape((GroupShape("mlp"),), tail_index=0, launch_counts=(0,)),)
    assert " ".join(map(str, step_boundaries(parse_actions("F0.0"), early))) == (
        "F0.0 F0.0:launch0 F0.0:tail F0.0:0 F0.0:end end"
    )
    marks = (ChunkShape((GroupShape("mlp", unkeep_count=2), GroupShape("mlp")), held_counts=(0, 2)),)
    assert " ".join(map(str, step_boundaries(parse_actions("F0.0"), marks))) == (
        "F0.0 F0.0:held0 F0.0:0 F0.0:1 F0.0:held2 F0.0:0/unkeep F0.0:end end"
    )
    assert [str(group) for group in group_keys(ACTIONS, SHAPES)] == ["0.0:0", "0.0:1", "0.1:0", "0.1:1"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GroupShape("mlp", nbytes=-1), "nbytes must not be negative, got -1"),
        (lambda: ChunkShape((GroupShape("mlp"),), launch_counts=(2,)), r"must be in \[0, 1\], got 2"),
        (lambda: Bounds(horizon_bytes=1, resident_bytes=1), "resident_bytes bounds what horizon_bytes bounds"),
        (lambda: step_boundaries(parse_actions("F1.0 B1.0"), SHAPES), "F1.0: there are shapes of 1 virtual stages"),
        (lambda: plan_step(parse_actions("B0.0 F0.0"), SHAPES), "B0.0 comes before its forward"),
        (lambda: plan_step(parse_actions("F0.0 F0.0 B0.0"), SHAPES), "F0.0 is listed twice"),
        (lambda: plan_step(parse_actions("F0.0 B0.1"), SHAPES), "B0.1 comes before its forward, or without it"),
        (
            lambda: validate_plan(parse_plan("F0.0:0 OUT 0.0:0"), parse_actions("F0.0"), SHAPES),
            "OUT 0.0:0: the step has no backward of its chunk",
        ),
    ],
)
def test_impossible_shapes_and_steps(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


needs_source = pytest.mark.skipif(IS_COMPILED, reason="a compiled policy cannot be wrapped: needs the pure Python core")

LINKS = {"fast": 1e6, "as it is": 50.0, "slow": 5.0}
LIMITS = [
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


@needs_source
@pytest.mark.parametrize("gbps", LINKS.values(), ids=LINKS)
@pytest.mark.parametrize("bounds", LIMITS, ids=str)
@pytest.mark.parametrize(
    "golden", [golden for golden in PLANS if golden.bounds == Bounds()], ids=lambda golden: golden.file.stem[5:]
)
def test_policies_make_the_planned_moves(golden: Golden, bounds: Bounds, gbps: float) -> None:
    shape = golden.shape
    is_recalled = golden.contents in ("experts", "shared", "single") or shape.overlap
    if is_recalled and bounds.max_inflight_bytes and shape.pp > 1:
        pytest.skip("no plan knows which groups a bound has not released: they are recalled early, and end all delays")
    for rank in range(shape.pp):
        job = RankJob(tuple(shape.actions(rank)), golden.shapes(rank), bounds)
        plan = plan_step(job.actions, job.shapes, bounds, is_combined=shape.overlap)
        assert diff_plans(copies_of(plan), RecordingRank(job, Link(gbps, gbps), shape.overlap).record()) == ""


@needs_source
@pytest.mark.parametrize("golden", PLANS, ids=lambda golden: golden.file.stem[5:])
def test_the_policy_that_follows_a_plan_makes_its_moves_and_each_once(golden: Golden) -> None:
    for rank in range(golden.shape.pp):
        job = RankJob(tuple(golden.shape.actions(rank)), golden.shapes(rank), golden.bounds)
        made = RecordingRank(job, Link(1e6, 1e6), golden.shape.overlap, planned=True).record()
        assert diff_plans(copies_of(golden.plan(rank)), made) == ""


if __name__ == "__main__":
    write_golden_files()
