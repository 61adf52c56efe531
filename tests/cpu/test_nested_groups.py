# SPDX-License-Identifier: Apache-2.0
"""A group inside another one commits first, and its backward comes last: it has the lower index, as plans assume."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch

from offload_engine import (
    IS_COMPILED,
    ChunkKey,
    ChunkOffloadHandler,
    GroupTraits,
    OffloadConfig,
    OffloadEngine,
    Planned,
)
from offload_engine.functions import group_commit
from offload_engine.planning.choices import slots_of
from offload_engine.planning.moves import BACKWARD, COMMIT, Boundary
from offload_engine.planning.shapes import step_boundaries
from offload_engine.schedule import Action

KEY = ChunkKey(0, 0)
ACTIONS = [Action("F", KEY), Action("B", KEY)]


def step(engine: OffloadEngine, inner: str) -> tuple[ChunkOffloadHandler, list[Boundary]]:
    """Run two layers, each a group with two groups inside; return the chunk and the boundaries that were reached."""
    reached: list[Boundary] = []
    at = engine._executor.at

    def note(kind: Any, chunk: Any = None, group: Any = None) -> None:
        if kind in (COMMIT, BACKWARD):
            reached.append(Boundary(kind, KEY, group.index))
        at(kind, chunk, group)

    engine._executor.at = note  # type: ignore[method-assign]
    with engine.iteration(ACTIONS):
        x = torch.ones(64, requires_grad=True)
        chunk = engine.start_chunk(KEY)
        out = x
        for layer in range(2):
            chunk.open_group("outer", GroupTraits(layer=layer))
            with chunk.saved_tensors_hooks():
                out = out.exp()
                for _ in range(2):
                    chunk.open_group(inner, GroupTraits(layer=layer))
                    with chunk.saved_tensors_hooks():
                        out = out.sin().exp()
                    out = group_commit(out, chunk)
                out = out.sin().exp()
            out = group_commit(out, chunk)
        chunk.end_forward()
        chunk.begin_backward()
        out.sum().backward()
    engine._executor.at = at  # type: ignore[method-assign]
    return chunk, reached


@pytest.mark.skipif(IS_COMPILED, reason="a compiled executor has no method that can be replaced")
@pytest.mark.parametrize("inner", ["inner", "outer"])
def test_groups_have_the_indices_of_their_commits(inner: str) -> None:
    """Else a plan expects other bytes on the device than there are: of experts, 3 GiB in each of 32,768 tokens."""
    with closing(OffloadEngine(OffloadConfig(min_tensor_bytes=1, directory="none", policy=Planned()))) as engine:
        for _ in range(2):
            engine.record()
            chunk, reached = step(engine, inner)
        shapes = engine._policy.shapes(ACTIONS)  # type: ignore[attr-defined]
        planned = [each for each in step_boundaries(ACTIONS, shapes) if each.kind in (COMMIT, BACKWARD)]
        assert reached == planned and len(reached) == 12
        assert [group.name for group in chunk.groups] == 2 * [inner, inner, "outer"]
        assert [group.part for group in chunk.groups] == [slot.part for slot in slots_of(0, shapes[0].groups)]
        record = engine.last_record
    assert record is not None and engine.stats.num_unplanned_groups == 0
    names = {group.group: group.name for group in record.groups}
    assert all(names[saved.group] == saved.name for saved in record.saved if saved.name)
    assert {stage.group for stage in record.stages} == set(names)
