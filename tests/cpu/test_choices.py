# SPDX-License-Identifier: Apache-2.0
"""Choices: what is kept does not move in any microbatch, with or without a plan; what is no plan is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from offload_engine import (
    ChunkKey,
    GroupTraits,
    OffloadConfig,
    OffloadEngine,
    Planned,
)
from offload_engine._policy.keeping import Keeping
from offload_engine._policy.leaving import LeavingQueue
from offload_engine._policy.policy import Policy
from offload_engine._saved.counters import ByteCounters
from offload_engine._saved.storage import TensorGroup
from offload_engine.planning.choices import Allowance, Choice, Choices, Slot, slots_of
from offload_engine.planning.plan import validate_plan
from offload_engine.planning.planner import plan_step
from offload_engine.planning.recompute import RecomputeOption, with_recomputation
from offload_engine.planning.saved_plan import parse_saved
from offload_engine.planning.shapes import GroupShape
from offload_engine.planning.simulate import PipelineJob
from tests.dense_jobs import ALL, ATTENTION, DEEP, MIB, ONE_RANK, dense_job

UP, DOWN = Slot(0, 0, "up", 0), Slot(0, 0, "down", 0)


def test_slots_count_the_groups_of_one_name_in_one_layer_and_each_has_a_choice() -> None:
    groups = [GroupShape("a", 0), GroupShape("b", 0), GroupShape("a", 0), GroupShape("a", 1)]
    assert slots_of(2, groups) == [Slot(2, 0, "a", 0), Slot(2, 0, "b", 0), Slot(2, 0, "a", 1), Slot(2, 1, "a", 0)]
    choices = Choices(frozenset({UP}), frozenset({DOWN}))
    found = [choices.of(slot) for slot in (UP, DOWN, Slot(0, 1, "up", 0))]
    assert found == [Choice.KEEP, Choice.RECOMPUTE, Choice.OFFLOAD]
    assert hash(choices) == hash(Choices(frozenset({UP}), frozenset({DOWN})))
    assert choices and not Choices()
    with pytest.raises(ValueError, match="0 0 up 0 is kept and recomputed: choose one"):
        Choices(frozenset({UP}), frozenset({UP}))


@pytest.mark.parametrize("job", [dense_job(ALL), dense_job(ATTENTION, virtual=4), DEEP, ONE_RANK])
def test_what_is_kept_has_no_move_in_any_microbatch(job: PipelineJob) -> None:
    for rank in job.ranks:
        slots = [slots_of(stage, shape.groups) for stage, shape in enumerate(rank.shapes)]
        every = [slot for of_stage in slots for slot in of_stage]
        choices = Choices(frozenset(every[::3]))
        plan, without = plan_step(rank.actions, rank.shapes, choices=choices), plan_step(rank.actions, rank.shapes)
        validate_plan(plan, rank.actions, rank.shapes)
        moved, could = ({slots[g.chunk.stage][g.index] for _, (_, g) in each.moves()} for each in (plan, without))
        assert moved == could - choices.kept
        assert plan_step(rank.actions, rank.shapes, choices=Choices()) == without
        assert list(plan_step(rank.actions, rank.shapes, choices=Choices(frozenset(every))).moves()) == []


def test_of_what_is_recomputed_only_what_is_still_saved_moves() -> None:
    [rank] = ONE_RANK.ranks
    slots = slots_of(0, rank.shapes[0].groups)
    mlp = frozenset(slots[3:5])  # mlp_fc1 has 128, mlp_act 448 MiB
    shapes = with_recomputation(rank.shapes, [RecomputeOption("mlp", mlp, 500 * MIB, 3.0)])
    before, after = (each[0].groups[3:5] for each in (rank.shapes, shapes))
    assert [group.nbytes // MIB for group in after] == [76, 0]
    assert [a.backward_ms - b.backward_ms for a, b in zip(after, before, strict=True)] == [0, 3]
    plan = plan_step(rank.actions, shapes, choices=Choices(recomputed=mlp))
    without = plan_step(rank.actions, rank.shapes)
    moved, could = ({slots[g.index] for _, (_, g) in each.moves()} for each in (plan, without))
    assert slots[3] in moved and moved == could - {slots[4]}
    assert [group.recomputed_bytes // MIB for group in after] == [52, 448]
    option = RecomputeOption(
        "mlp", mlp, 500 * MIB, 3.0, output_bytes=64 * MIB
    )  # to the end of the first group's backward
    [shape] = with_recomputation(rank.shapes, [option])
    assert [group.recomputed_bytes // MIB for group in shape.groups[3:5]] == [116, 448]
    [shape] = with_recomputation(rank.shapes, [dataclasses.replace(option, comes_back=False)])
    assert [group.recomputed_bytes // MIB for group in shape.groups[3:5]] == [64, 0]
    with pytest.raises(ValueError, match="it must replace a group"):
        RecomputeOption("mlp", frozenset(), 1, 1.0)


@pytest.mark.parametrize(
    ("name", "is_kept", "more_bytes", "more_resident", "expected"),
    [
        ("up", False, 0, 0, "stays"),
        ("up", False, 1, 0, "leaves"),
        ("up", False, 0, 1, "leaves"),
        ("up", True, 1, 0, "as its traits say"),
        ("down", False, 0, 0, "as the policy says"),
    ],
)
def test_what_is_chosen_stays_up_to_its_bytes_and_to_the_resident_bytes_and_else_leaves(
    name: str, is_kept: bool, more_bytes: int, more_resident: int, expected: str
) -> None:
    counters = ByteCounters(None)
    keeping = Keeping(Policy(counters, LeavingQueue()), counters)
    keeping.allow(Allowance(Choices(frozenset({UP})), {UP: 1024}, 2048))
    group = TensorGroup(ChunkKey(0, 0), 0, name, GroupTraits(is_kept, layer=0))
    group.own_bytes, counters.resident_bytes = 1024 + more_bytes, 2048 + more_resident
    group.stays = keeping.may_stay(group)
    assert (group.stays, keeping.outgrows(group)) == (expected == "stays", expected == "leaves")
    assert counters.stats.num_outgrown_groups == more_bytes + more_resident


def test_a_kept_group_stays_where_that_its_backward_comes_at_once_is_taken_back() -> None:
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=1, directory="none", policy=Planned()))
    engine._keeping.allow(Allowance(Choices(frozenset({UP})), {UP: 256}, 1 << 30))
    with engine.iteration():
        chunk = engine.start_chunk(ChunkKey(0, 0))
        handles = []
        for name in ("up", "down"):
            chunk.open_group(name, GroupTraits(keep=True, layer=0))
            handles.append(chunk.tensor_push(torch.ones(256, dtype=torch.uint8)))
            chunk.close_group(keep=True)
        chunk.offload_kept_groups()
        assert [group.leaving_bytes + group.on_host_bytes > 0 for group in chunk.groups] == [False, True]
        del handles
    engine.close()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"version": 0}', '{"version": 1, "held_bytes": 1}', "nonsense"])
def test_what_is_no_plan_is_refused_by_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"^plan.json is not a plan of this version \(.*\): remove it") as caught:
        parse_saved(text, "plan.json")
    assert "\n" not in str(caught.value)
