# SPDX-License-Identifier: Apache-2.0
"""Plans as text, what makes one invalid, and how two differ."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_engine.planning.moves import (
    COMMIT,
    DROP,
    IN,
    ITERATION_END,
    OUT,
    Boundary,
    BoundaryKind,
    GroupKey,
    PlannedMove,
)
from offload_engine.planning.plan import Line, Plan, diff_plans, format_plan, make_plan, parse_plan, validate_plan
from offload_engine.planning.planner import plan_step
from offload_engine.planning.shapes import Bounds, ChunkShape, GroupShape, group_keys, step_boundaries
from offload_engine.schedule import ChunkKey, parse_actions

ACTIONS = parse_actions("F0.0 F0.1 B0.0 B0.1")
SHAPES = (ChunkShape((GroupShape("attention"), GroupShape("mlp")), tail_index=1, launch_counts=(2,), has_head=True),)

KEYS = st.builds(ChunkKey, st.integers(0, 12), st.integers(0, 300))
GROUPS = st.builds(GroupKey, KEYS, st.integers(0, 99))
WITH_INDEX = [kind for kind in BoundaryKind if "{i}" in kind.value]
WITHOUT_INDEX = [kind for kind in BoundaryKind if kind not in WITH_INDEX and kind is not ITERATION_END]
BOUNDARIES = st.one_of(
    st.builds(Boundary, st.sampled_from(WITH_INDEX), KEYS, st.integers(0, 99)),
    st.builds(Boundary, st.sampled_from(WITHOUT_INDEX), KEYS, st.just(-1)),
    st.just(Boundary(ITERATION_END)),
)
MOVES = st.lists(st.builds(PlannedMove, st.sampled_from([OUT, DROP, IN]), GROUPS), min_size=1, max_size=5)
PLANS = st.dictionaries(BOUNDARIES, MOVES, max_size=8).map(
    lambda lines: Plan(tuple(Line(boundary, tuple(moves)) for boundary, moves in lines.items()))
)


@settings(deadline=None, derandomize=True, database=None)
@given(PLANS)
def test_parse_is_the_inverse_of_format(plan: Plan) -> None:
    assert parse_plan(format_plan(plan)) == plan


@settings(deadline=None, derandomize=True, database=None)
@given(st.text(alphabet="FB0.1:/end OUTDROPIN\n#", max_size=40))
def test_format_is_the_inverse_of_parse(text: str) -> None:
    with contextlib.suppress(ValueError):
        plan = parse_plan(text)
        assert parse_plan(format_plan(plan)) == plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0.0:0 OUT 0.0:0\nF0.x OUT 0.0:1", "line 2: not a boundary: 'F0.x'"),
        ("# none\nF0.0:0 OUT 0.0", "line 2: not a group: '0.0'"),
        ("F0.0:0 0.0:0", "line 1: expected one of OUT, DROP, IN after F0.0:0, got '0.0:0'"),
        ("F0.0:0", "line 1: F0.0:0 without a move"),
        ("F0.0:0 OUT", "line 1: OUT without a group"),
        ("F0.0:0 OUT IN 0.0:0", "line 1: OUT without a group"),
        ("F0.0:0 OUT 0.0:0\n\nF0.0:0 OUT 0.0:0", "line 3: F0.0:0 has a line already"),
    ],
)
def test_text_that_is_no_plan(text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_plan(text)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0.0:0 OUT 0.0:0", "line 1 (F0.0:0): OUT 0.0:0: nothing brings it back"),
        ("F0.0:0 OUT 0.0:1\nB0.0:1 IN 0.0:1", "line 1 (F0.0:0): OUT 0.0:1: it has not committed"),
        ("B0.0:1 IN 0.0:1", "line 1 (B0.0:1): IN 0.0:1: it has not left"),
        ("F0.0:0 OUT 0.0:0\nF0.0:1 OUT 0.0:0", "line 2 (F0.0:1): OUT 0.0:0: it has left before and not come back"),
        ("F0.0:1 DROP 0.0:0", "line 1 (F0.0:1): DROP 0.0:0: it has not left"),
        (
            "F0.0:0 OUT 0.0:0\nF0.0:1 DROP 0.0:0\nF0.1 DROP 0.0:0",
            "line 3 (F0.1): DROP 0.0:0: it has been released before",
        ),
        ("F0.0:1 OUT 0.0:1\nB0.0:0 IN 0.0:1", "line 2 (B0.0:0): IN 0.0:1: its backward has begun before"),
        ("B0.0:0 OUT 0.0:1", "line 1 (B0.0:0): OUT 0.0:1: its backward has begun before"),
        ("F0.0:2 OUT 0.0:2", "line 1 (F0.0:2): OUT 0.0:2: the step has no such boundary"),
        ("F0.0:1 OUT 0.0:2", "line 1 (F0.0:1): OUT 0.0:2: the step has no such group"),
        (
            "F0.1:0 OUT 0.1:0\nF0.0:1 OUT 0.0:1",
            "line 2 (F0.0:1): OUT 0.0:1: the boundary comes before that of the line above",
        ),
    ],
)
def test_a_plan_that_no_step_can_follow(text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        validate_plan(parse_plan(text), ACTIONS, SHAPES)
    assert str(error.value) == message


def test_a_plan_names_a_boundary_once_and_only_with_moves() -> None:
    line = Line(Boundary(COMMIT, ChunkKey(0, 0), 0), (PlannedMove(OUT, GroupKey(ChunkKey(0, 0), 0)),))
    with pytest.raises(ValueError, match="each boundary once"):
        Plan((line, line))
    with pytest.raises(ValueError, match="only those that have moves"):
        Plan((line._replace(moves=()),))
    assert make_plan([line, line._replace(boundary=Boundary(ITERATION_END), moves=())]) == Plan((line,))


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
        (lambda: ChunkShape((), head_ms=-1.0), "head_ms must not be negative"),
        (lambda: Bounds(horizon_bytes=-1), "horizon_bytes must not be negative"),
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
