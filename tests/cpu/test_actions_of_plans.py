# SPDX-License-Identifier: Apache-2.0
"""Steps that cannot be planned, and links that cannot be, are refused by name."""

from __future__ import annotations

import pytest

from offload_engine.planning.hardware import find_hardware
from offload_engine.planning.plan import parse_plan, validate_plan
from offload_engine.planning.planner import plan_step
from offload_engine.planning.shapes import ChunkShape, GroupShape
from offload_engine.schedule import parse_actions

SHAPES = (ChunkShape((GroupShape("a", 0, 10), GroupShape("b", 0, 10))),)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ("B0.0 F0.0", "B0.0 comes before its forward"),
        ("F0.0 F0.0 B0.0", "F0.0 is listed twice"),
        ("F0.0 B0.1", "B0.1 comes before its forward, or without it"),
    ],
)
def test_actions_that_are_no_step(actions: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_step(parse_actions(actions), SHAPES)


def test_a_plan_of_a_chunk_without_a_backward() -> None:
    with pytest.raises(ValueError, match="OUT 0.0:0: the step has no backward of its chunk"):
        validate_plan(parse_plan("F0.0:0 OUT 0.0:0"), parse_actions("F0.0"), SHAPES)


def test_a_link_of_no_gpu() -> None:
    with pytest.raises(ValueError, match="num_copying=0"):
        find_hardware("h200").link(0, True)
