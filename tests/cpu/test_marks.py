# SPDX-License-Identifier: Apache-2.0
"""Where the backward of a group begins, and in which order those of groups inside others do."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
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
    group_commit,
)
from offload_engine._compat.reads import read_plain
from offload_engine._saved.storage import SavedStorage, TensorGroup
from offload_engine.planning.choices import slots_of
from offload_engine.planning.moves import BACKWARD, COMMIT, Boundary
from offload_engine.planning.shapes import step_boundaries
from offload_engine.schedule import parse_actions


class Noting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, log: list[str]) -> torch.Tensor:
        ctx.name, ctx.log = name, log
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.log.append(ctx.name)
        return grads[0] * 2, None, None


class Chunk:
    """A chunk whose groups only note when they end and when their backward begins."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.groups: Any = SimpleNamespace(innermost=None)
        self.boundaries = SimpleNamespace(close=self.on_group_commit_forward, begin_backward=self.begin_backward)
        self.on_group_commit_backward = self.begin_backward

    def open_group(self, name: str, saves: bool = True) -> None:
        group = self.groups.innermost = TensorGroup(ChunkKey(0, 0), 0, name, GroupTraits())
        if saves:
            tensor = torch.ones(3)
            group.add(SavedStorage(tensor, read_plain(tensor, tensor.device, 0), group, None))

    def on_group_commit_forward(self) -> TensorGroup | None:
        group, self.groups.innermost = self.groups.innermost, None
        return group

    def begin_backward(self, group: TensorGroup | None) -> None:
        self.log.append(group.name if group is not None else "no group")

    def run(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Apply an operation that notes its backward."""
        return Noting.apply(x, name, self.log)

    def commit(self, tensor: torch.Tensor) -> torch.Tensor:
        return group_commit(tensor, self)  # type: ignore[arg-type]


def test_nodes_of_the_group_are_left_alone() -> None:
    chunk, x = Chunk(), torch.ones(3, requires_grad=True)
    chunk.open_group("group")
    inside = chunk.run(chunk.run(x, "first"), "last")
    out = chunk.commit(inside)
    assert out is inside
    loss = (chunk.run(out, "one reader") + chunk.run(out, "another reader")).sum()
    loss.backward(retain_graph=True)
    expected = ["another reader", "one reader", "group", "last", "first"]
    assert chunk.log == expected
    loss.backward()
    assert chunk.log == 2 * expected, "a retained graph runs it again"
    assert torch.equal(x.grad, torch.full((3,), 2 * 2 * 8.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("is_view", [False, True])
def test_the_model_may_write_into_the_output(is_view: bool) -> None:
    """A write into a view takes the node that made the view out of the graph, and a hook on that node with it."""
    chunk, x = Chunk(), torch.ones(3, requires_grad=True)
    chunk.open_group("group")
    inside = torch.sin(chunk.run(x, "first"))
    out = chunk.commit(inside[1:] if is_view else inside)
    chunk.run(out.mul_(2), "reader").sum().backward()
    assert chunk.log == ["reader", "group", "first"]


@pytest.mark.parametrize("saves", [True, False])
def test_nodes_before_the_group_get_an_identity_unless_it_is_empty(saves: bool) -> None:
    """The node that made it runs its backward behind the group's own: a hook there would come too late.

    An identity would add up the gradients of its readers before those of others: another last bit.
    """
    chunk, x = Chunk(), torch.ones(3, requires_grad=True)
    before = chunk.run(x, "before")
    chunk.open_group("group", saves)
    inside = chunk.run(before, "inside")
    passed = chunk.commit(before)
    assert (passed is before) is not saves and torch.equal(passed, before) and chunk.groups.innermost is None
    (chunk.run(passed, "reader") + inside).sum().backward()
    assert chunk.log == ["reader", *["group"] * saves, "inside", "before"]


def test_leaves_tensors_without_gradient_and_outputs_of_several() -> None:
    chunk, leaf = Chunk(), torch.ones(3, 2, requires_grad=True)
    chunk.open_group("of a leaf")
    chunk.run(chunk.commit(leaf), "reader").sum().backward()
    chunk.open_group("without gradient")
    assert not chunk.commit(torch.ones(3)).requires_grad and chunk.groups.innermost is None
    chunk.open_group("one of two outputs")
    largest, _ = (leaf * 2).max(dim=1)
    out = chunk.commit(largest)
    assert out is largest
    out.sum().backward()
    chunk.commit(leaf * 1).sum().backward()
    assert chunk.log == ["reader", "of a leaf", "one of two outputs", "no group"]


def test_the_mark_leaves_hooks_of_others_alone() -> None:
    chunk, x = Chunk(), torch.ones(3, requires_grad=True)
    for name in ("first", "second"):
        chunk.open_group(name)
        x = chunk.run(x, f"backward of {name}")
        if name == "second":
            x.register_hook(lambda _: chunk.log.append("hook before the mark"))
        hooks = x._backward_hooks
        x = chunk.commit(x)
        assert x._backward_hooks is hooks
        x.register_hook(lambda _, name=name: chunk.log.append(f"hook after the mark of {name}"))
    x.sum().backward()
    assert set(chunk.log[:3]) == {"hook before the mark", "hook after the mark of second", "second"}
    assert chunk.log[3:] == ["backward of second", "first", "hook after the mark of first", "backward of first"]


# A group inside another one commits first, and its backward comes last: it has the lower index, as plans assume.

ACTIONS = parse_actions("F0.0 B0.0")


def nested_step(engine: OffloadEngine, inner: str) -> tuple[ChunkOffloadHandler, list[Boundary]]:
    """Run two layers, each a group with two groups inside; return the chunk and the boundaries that were reached."""
    reached: list[Boundary] = []
    at = engine._executor.at

    def note(kind: Any, chunk: Any = None, group: Any = None) -> None:
        if kind in (COMMIT, BACKWARD):
            reached.append(Boundary(kind, ACTIONS[0].chunk, group.index))
        at(kind, chunk, group)

    engine._executor.at = note  # type: ignore[method-assign]
    with engine.iteration(ACTIONS):
        x = torch.ones(64, requires_grad=True)
        chunk = engine.start_chunk()
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
            chunk, reached = nested_step(engine, inner)
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
