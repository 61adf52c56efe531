# SPDX-License-Identifier: Apache-2.0
"""Before the backward of a chunk only the groups of its last layer are copied in."""

from __future__ import annotations

import pytest
import torch

from offload_engine import ChunkKey, ChunkOffloadHandler, GroupTraits, OffloadConfig, OffloadEngine
from offload_engine.schedule import parse_actions
from tests.adversarial import AdversarialDevice

NUMEL = 64
GROUP_BYTES = 4 * NUMEL
FIRST, SECOND = ChunkKey(0, 0), ChunkKey(0, 1)


class Bench:
    """Chunks whose groups leave as they commit; one named `large` makes the horizon wide."""

    def __init__(self, order: str, **settings: int) -> None:
        self.device = AdversarialDevice()
        config = OffloadConfig.from_flags(**{"min_tensor_bytes": 0, "max_inflight_bytes": 0, **settings})
        self.engine = OffloadEngine(config, self.device)
        self.engine.begin_iteration(parse_actions(order))
        self.handles: dict[ChunkKey, list[object]] = {}

    def forward(
        self,
        key: ChunkKey,
        names: str,
        *,
        ends: bool = True,
        layer_size: int | None = None,
        num_in_tail: int | None = None,
    ) -> ChunkOffloadHandler:
        """With a `layer_size`, groups are told their layers, of as many groups each."""
        chunk = self.engine.start_chunk(key)
        self.handles[key] = []
        for index, name in enumerate(names.split()):
            chunk.open_group(name, GroupTraits(layer=index // layer_size if layer_size else -1))
            self.handles[key].append(chunk.tensor_push(torch.ones(4 * NUMEL if name == "large" else NUMEL)))
            chunk.close_group()
            if num_in_tail is not None and index + 1 == len(names.split()) - num_in_tail:
                chunk.begin_tail()
        if ends:
            chunk.end_forward()
        return chunk

    def backward(self, chunk: ChunkOffloadHandler) -> None:
        handles = self.handles[chunk.key]
        while handles:
            chunk.on_group_commit_backward(chunk.groups[len(handles) - 1])
            chunk.tensor_pop(handles.pop())
            chunk.on_group_start_backward()

    @property
    def num_copied_in(self) -> int:
        return self.device.num_copies["in"]

    def finish(self) -> int:
        """Finish the step; return how many storages were late."""
        self.handles.clear()
        misses = self.engine.end_iteration().prefetch_misses
        self.engine.close()
        assert self.device.hazards == []
        return misses


@pytest.mark.parametrize(
    ("names", "expected"),
    [("large qkv qkv qkv", 1), ("large qkv attn qkv attn", 2), ("large qkv attn fc qkv attn fc", 3)],
)
def test_only_the_last_of_each_name(names: str, expected: int) -> None:
    bench = Bench("F0.0 F0.1 B0.0 B0.1")
    first = bench.forward(FIRST, names)
    bench.forward(SECOND, names)
    assert bench.num_copied_in == expected
    bench.backward(first)
    assert bench.finish() == 0


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize(("layer_size", "expected"), [(4, 4), (None, 1)])
def test_all_of_the_last_layer_where_a_name_has_two_places(
    layer_size: int | None, expected: int, num_layers: int
) -> None:
    bench, names = Bench("F0.0 F0.1 B0.0 B0.1"), "large qkv tokens tokens " * num_layers
    bench.forward(FIRST, names, layer_size=layer_size)
    bench.forward(SECOND, names, layer_size=layer_size)
    assert bench.num_copied_in == expected
    bench.finish()


@pytest.mark.parametrize("layer_size", [2, None])
def test_a_name_in_early_layers_only_comes_neither_early_nor_late(layer_size: int | None) -> None:
    """As the MLP of dense layers in front of experts: the last of its name is in no last layer."""
    bench, names = Bench("F0.0 F0.1 B0.0 B0.1"), "qkv mlp qkv mlp qkv experts qkv experts"
    first = bench.forward(FIRST, names, layer_size=layer_size)
    second = bench.forward(SECOND, names, layer_size=layer_size)
    assert {group.name for group in first.groups if not group.on_host_bytes} == {"qkv", "experts"}
    assert bench.num_copied_in == 2, "the last layer"
    bench.backward(first)
    bench.backward(second)
    assert bench.finish() == 0


def test_the_groups_of_the_layers_before_come_when_that_backward_has_begun() -> None:
    bench = Bench("F0.0 F0.1 B0.0 B0.1")
    first = bench.forward(FIRST, "large qkv qkv qkv")
    bench.forward(SECOND, "large qkv qkv qkv")
    first.begin_backward()
    assert bench.num_copied_in == 1  # of its last group it has not: memory has its peak before that
    first.on_group_commit_backward(first.groups[-1])
    assert bench.num_copied_in == 4 + 1  # all its own, and the last of the chunk behind it
    bench.finish()


@pytest.mark.parametrize("order", ["F0.0 B0.0", ""])
@pytest.mark.parametrize(
    ("num_in_tail", "expected"), [(0, [2, 3, 5]), (1, [3, 3, 5]), (2, [5, 5, 5]), (None, [5, 5, 5])]
)
def test_behind_a_loss_the_layers_before_come_when_the_backward_is_at_the_last_of_their_name(
    num_in_tail: int | None, expected: list[int], order: str
) -> None:
    """What the loss freed is in few pieces then for the weight gradients of the tail; their memory is the next peak."""
    bench = Bench(order)
    chunk = bench.forward(FIRST, "large qkv attn qkv attn", num_in_tail=num_in_tail)
    for _ in range(2):  # once for each gradient of the logits
        chunk.end_loss()
        assert bench.num_copied_in == expected[0]
    for group, num_copied_in in zip(reversed([*chunk.groups]), expected[1:], strict=False):
        chunk.on_group_commit_backward(group)
        assert bench.num_copied_in == num_copied_in
    bench.finish()


def test_without_a_tail_all_names_come_when_that_backward_has_begun() -> None:
    bench, names = Bench("F0.0 F0.1 B0.0 B0.1"), "large qkv attn qkv attn"
    first = bench.forward(FIRST, names)
    bench.forward(SECOND, names)
    first.on_group_commit_backward(first.groups[-1])
    assert bench.num_copied_in == 5 + 1  # all its own, and the last of the chunk behind it
    bench.finish()


def test_behind_a_loss_no_name_that_the_last_layer_lacks_is_late() -> None:
    bench = Bench("F0.0 B0.0")
    chunk = bench.forward(FIRST, "fc qkv fc qkv attn qkv attn", num_in_tail=0)
    chunk.end_loss()
    bench.backward(chunk)
    assert bench.finish() == 0


@pytest.mark.parametrize("settings", [{"horizon_bytes": 1 << 20}, {"prefetch_groups": 9}])
def test_explicit_horizon_is_obeyed_behind_a_loss(settings: dict[str, int]) -> None:
    bench = Bench("F0.0 B0.0", **settings)
    bench.forward(FIRST, "qkv attn qkv attn", num_in_tail=0).end_loss()
    assert bench.num_copied_in == 4
    bench.finish()


def test_unreleased_groups_are_recalled_when_the_loss_ends() -> None:
    bench = Bench("F0.0 B0.0", max_inflight_bytes=1 << 20)
    chunk = bench.forward(FIRST, "large qkv qkv qkv", num_in_tail=0)
    chunk.end_loss()
    bench.device.synchronize_all()
    bench.backward(chunk)
    assert bench.num_copied_in == 0
    bench.finish()


def test_unreleased_groups_leave_before_a_backward_except_its_last_layer() -> None:
    bench = Bench("F0.0 F0.1 B0.0 B0.1", max_inflight_bytes=1 << 20)
    first = bench.forward(FIRST, "large qkv qkv qkv")
    bench.forward(SECOND, "qkv")
    bench.device.synchronize_all()
    bench.backward(first)
    assert bench.num_copied_in == 3 + 1  # and the last of the chunk behind it
    bench.finish()


def test_the_next_loss_holds_back_as_the_first_did() -> None:
    bench = Bench("F0.0 B0.0 F0.1 B0.1")
    bench.backward(bench.forward(FIRST, "large qkv qkv qkv", num_in_tail=0))
    num_before = bench.num_copied_in
    bench.forward(SECOND, "large qkv qkv qkv", num_in_tail=0).end_loss()
    assert bench.num_copied_in == num_before + 1
    bench.finish()


def test_explicit_horizon_is_obeyed() -> None:
    bench = Bench("F0.0 F0.1 B0.0 B0.1", horizon_bytes=3 * GROUP_BYTES)
    bench.forward(FIRST, "qkv qkv qkv qkv")
    bench.forward(SECOND, "qkv")
    assert bench.num_copied_in == 3
    bench.finish()


@pytest.mark.parametrize(("ends", "misses"), [(True, 0), (False, 1)])
def test_the_last_forward_of_a_step_ends_too(ends: bool, misses: int) -> None:
    """Else the first group of that chunk, and of those behind it, would be late: no other forward says it is over."""
    bench = Bench("F0.0 F0.1 B0.0 B0.1")
    first = bench.forward(FIRST, "qkv qkv")
    second = bench.forward(SECOND, "qkv qkv", ends=ends)
    bench.backward(first)
    bench.backward(second)
    assert bench.finish() == misses


@pytest.mark.parametrize("is_used", [True, False])
def test_copy_ins_are_ahead_until_awaited_or_unused(is_used: bool) -> None:
    """Till then host bytes that they read are lent last."""
    bench = Bench("F0.0 F0.1 B0.0 B0.1", horizon_bytes=3 * GROUP_BYTES)
    first = bench.forward(FIRST, "qkv qkv qkv qkv")
    bench.forward(SECOND, "qkv")
    ahead = bench.engine._store._mover._unawaited
    assert len(ahead) == 3
    if is_used:
        first.tensor_pop(bench.handles[FIRST][-1])
        assert len(ahead) == 2
        bench.backward(first)
        assert len(ahead) == 1, "that of the second chunk"
    bench.handles.clear()
    assert len(ahead) == 0
    bench.finish()
