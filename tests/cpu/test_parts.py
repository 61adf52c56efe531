# SPDX-License-Identifier: Apache-2.0
"""Parts of one storage that several groups save, and writes that the first save's version counter does not show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from offload_engine import (
    ChunkOffloadHandler,
    FixedBounds,
    OffloadConfig,
    OffloadEngine,
    ResidentBudget,
    enable_activation_offloading,
    manage_activations,
)
from offload_engine._compat.reads import read_plain
from offload_engine._saved.places import covers
from tests.adversarial import AdversarialDevice
from tests.engine_state import release_all

SIDE = 8
NUM_PARTS = 4


@pytest.fixture(params=[None, 0, 1])
def engine(request: pytest.FixtureRequest) -> Iterator[OffloadEngine]:
    config = OffloadConfig.from_flags(min_tensor_bytes=0, max_inflight_bytes=0)  # what one group saves leaves at once
    engine = OffloadEngine(config, AdversarialDevice(request.param))
    yield engine
    engine.close()


# -- writes past the version counter ----------------------------------------------------------------------------------


class Part(nn.Module):
    """Fills its part of a workspace that all layers share, unseen by the version counter, then saves it."""

    def __init__(self, index: int, model: Workspace) -> None:
        super().__init__()
        self.index, self.model = index, [model]
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        arena = self.model[0].arena
        if self.index % 2:
            arena.data[self.index] = 2.0 + self.index
        else:
            arena.numpy()[self.index] = 2.0 + self.index
        return x * arena[self.index] * self.scale + x


class Workspace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Part(index, self) for index in range(NUM_PARTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.arena = torch.zeros(NUM_PARTS, SIDE, SIDE)  # a new one in each step
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_fill_parts_of_one_workspace() -> None:
    def gradient() -> torch.Tensor:
        x = torch.ones(SIDE, SIDE, requires_grad=True)
        return torch.autograd.grad(model(x).sum(), x)[0]

    model = Workspace()
    expected = gradient()
    config = OffloadConfig(min_tensor_bytes=0, policy=ResidentBudget(0), directory="none")
    handle = enable_activation_offloading(model, "none", config=config)
    assert torch.equal(gradient(), expected)
    handle.remove()


def save_each(chunk: ChunkOffloadHandler, tensors: Iterator[torch.Tensor]) -> list[object]:
    """Save each tensor in a group of its own; return their handles."""
    handles: list[object] = []
    for tensor in tensors:
        chunk.open_group("group")
        handles.append(chunk.tensor_push(tensor))
        chunk.close_group()
    return handles


def test_a_part_that_is_written_after_its_handle_is_gone_is_another_save(engine: OffloadEngine) -> None:
    """As in a workspace that each microbatch fills anew, while another part of it is still needed."""
    with engine.iteration():
        chunk, arena = engine.start_chunk(), torch.zeros(2, SIDE)
        gone, kept = save_each(chunk, iter(arena))
        engine.device.synchronize_all()
        del gone
        arena.data[0] = 1
        [again] = save_each(chunk, iter([arena[0]]))
        assert (chunk.tensor_pop(again) == 1).all() and (chunk.tensor_pop(kept) == 0).all()


def test_a_view_of_what_an_earlier_group_saved_is_not_copied_again(engine: OffloadEngine) -> None:
    x = torch.rand(SIDE, SIDE)
    with engine.iteration():
        chunk = engine.start_chunk()
        views = [x, x[2:4], x.view(-1), x.t(), x.expand(2, -1, -1), x[:, 1], x.view(torch.int32)]
        handles = save_each(chunk, iter(views))
        assert all(torch.equal(chunk.tensor_pop(h), view) for h, view in zip(handles, views, strict=True))
        del handles
    assert engine.stats.copied_out_bytes == x.nbytes


@pytest.mark.parametrize(
    ("saved", "other", "is_covered"),
    [
        (lambda x: x, lambda x: x[3, 2:5], True),
        (lambda x: x[1:3], lambda x: x[1:3], True),
        (lambda x: x[1:3], lambda x: x[2], True),
        (lambda x: x[1:3], lambda x: x[2:4], False),
        (lambda x: x[1:3], lambda x: x[0:2], False),
        (lambda x: x[1:3], lambda x: x[:0], True),  # it has no bytes
        (lambda x: x[:0], lambda x: x[0], False),
        (lambda x: x.t(), lambda x: x[5], True),
        (lambda x: x[:, 2:4], lambda x: x[:, 2:4], True),
        (lambda x: x[:, 2:4], lambda x: x[:, 4:6], True),  # parts of one split
        (lambda x: x[:3, 2:4], lambda x: x[5:, 4:6], False),  # one behind the other
        (lambda x: x[:, 2:4], lambda x: x[1, 4:6], False),  # between its bytes, and dense
        (lambda x: x[::2], lambda x: x[1], False),
        (lambda x: x[1].expand(3, SIDE), lambda x: x[1], True),
        (lambda x: x.as_strided((2, 3), (5, 0)), lambda x: x[0, 1:3], False),  # as many elements as its span has
        (lambda x: x[:2], lambda x: x.view(torch.int16)[1], True),
        (lambda x: x[:2], lambda x: x.view(torch.int16)[2], False),
    ],
)
def test_a_place_covers_what_was_saved_or_split_with_it(
    saved: Callable[[torch.Tensor], torch.Tensor], other: Callable[[torch.Tensor], torch.Tensor], is_covered: bool
) -> None:
    x = torch.zeros(SIDE, SIDE)
    places = [read_plain(part(x), x.device, 0)[5] for part in (saved, other)]
    assert covers(*places) == is_covered


# -- parts with version counters of their own -------------------------------------------------------------------------


def save_parts(chunk: ChunkOffloadHandler) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return the two parts of a tensor, and what one group made of each."""
    parts = torch.unsafe_chunk(torch.rand(SIDE, SIDE, requires_grad=True) * 2, 2)
    chunk.open_group("group")
    with chunk.saved_tensors_hooks():
        outputs = [part.sin().sum() for part in parts]
    return parts[0], parts[1], outputs


@pytest.mark.parametrize("is_leaving", [False, True])
@pytest.mark.parametrize("written", [0, 1])
def test_a_part_modified_after_its_save_is_an_error(written: int, is_leaving: bool) -> None:
    """The others are as they were saved: their backward runs."""
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0), AdversarialDevice())
    with engine.iteration():
        chunk = engine.start_chunk()
        *parts, outputs = save_parts(chunk)
        if is_leaving:
            chunk.close_group()
        with torch.no_grad():
            parts[written].mul_(3)
        if not is_leaving:
            chunk.close_group()
        outputs[1 - written].backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            outputs[written].backward()
        del outputs


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_part_is_written_while_the_whole_is_copied(seed: int | None) -> None:
    """The other part is as it was saved, and nothing is out of order."""

    def gradient_of(around: AbstractContextManager[Any]) -> torch.Tensor:
        x = torch.rand(SIDE, SIDE, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with around:
            saved, written = torch.unsafe_chunk(x * 2, 2)
            total = saved.sin().sum() + x.exp().sum()  # the second closes the group of the first
            total = total + written.mul_(3).cos().sum()
        total.backward()
        assert x.grad is not None
        return x.grad

    device = AdversarialDevice(seed)
    config = OffloadConfig(min_tensor_bytes=0, policy=FixedBounds(max_inflight_bytes=1 << 30))
    activations = manage_activations(engine=OffloadEngine(config, device), group_bytes=1)
    expected = gradient_of(nullcontext())
    with device.observe_compute():
        assert torch.equal(gradient_of(activations), expected) and not device.hazards
    activations.close()


def test_several_saves_of_a_storage_do_not_hold_its_bytes() -> None:
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0, directory="none"))
    with engine.iteration():
        chunk = engine.start_chunk()
        *parts, outputs = save_parts(chunk)
        storage = StorageWeakRef(parts[0].untyped_storage())
        del parts
        chunk.close_group()
        assert not storage.expired()
        release_all(engine)
        assert storage.expired()
        (outputs[0] + outputs[1]).backward()
        del outputs
    engine.close()
