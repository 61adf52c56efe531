# SPDX-License-Identifier: Apache-2.0
"""What is saved comes back: in the form that it had, with the bytes of its own time, whatever shares its storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload_engine import (
    ChunkOffloadHandler,
    FixedBounds,
    GroupTraits,
    OffloadConfig,
    OffloadEngine,
    ResidencyMeter,
    manage_activations,
)
from offload_engine._compat.reads import read_plain
from offload_engine._saved.places import covers
from tests.adversarial import AdversarialDevice
from tests.engine_state import release_all

SIDE = 8
AT_ONCE = OffloadConfig(min_tensor_bytes=0, policy=FixedBounds(max_inflight_bytes=0))  # what a group saves leaves then
LATE = OffloadConfig(min_tensor_bytes=0, policy=FixedBounds(max_inflight_bytes=1 << 30))


@pytest.fixture(params=[None, 0, 1])
def engine(request: pytest.FixtureRequest) -> Iterator[OffloadEngine]:
    """Its copies are as late as the waits allow, or at random times."""
    engine = OffloadEngine(AT_ONCE, AdversarialDevice(request.param), ResidencyMeter())
    yield engine
    engine.close()
    assert not engine.device.hazards  # type: ignore[attr-defined]


def save(chunk: ChunkOffloadHandler, tensors: Iterable[torch.Tensor], traits: GroupTraits | None = None) -> list[Any]:
    """Save tensors in one group; return their handles."""
    chunk.open_group("group", traits)
    handles = [chunk.tensor_push(tensor) for tensor in tensors]
    chunk.close_group()
    return handles


FORMS: dict[str, Callable[[], torch.Tensor]] = {
    "whole": lambda: torch.randn(4, 3, 2),
    "number": lambda: torch.tensor(7.0),
    "bytes": lambda: torch.arange(100, dtype=torch.uint8),
    "dimensions of one, with strides of their own": lambda: torch.randn(6).as_strided((6, 1, 1), (1, 17, 5)),
    "transposed": lambda: torch.randn(4, 5).t(),
    "part": lambda: torch.randn(10)[2:7],
    "front": lambda: torch.randn(10)[:5],
    "expanded": lambda: torch.randn(1, 5).expand(4, 5),
    "reinterpreted": lambda: torch.randn(8).view(torch.int32),
    "conjugate": lambda: torch.randn(3, 2, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
}


def form_of(tensor: torch.Tensor) -> tuple[object, ...]:
    bits = (tensor.is_conj(), tensor.is_neg(), tensor.requires_grad)
    return (*bits, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())


@pytest.mark.parametrize("is_on_host", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_each_form_comes_back(form: str, is_on_host: bool) -> None:
    """Twice, in the form that it had."""
    tensor, engine = FORMS[form](), OffloadEngine(OffloadConfig(min_tensor_bytes=0), AdversarialDevice())
    expected, values = form_of(tensor), tensor.clone()
    with engine.iteration():
        chunk = engine.start_chunk()
        [handle] = save(chunk, [tensor])
        del tensor
        if is_on_host:
            release_all(engine)
        chunk.on_group_commit_backward(chunk.groups[0])
        for _ in range(2):
            restored = chunk.tensor_pop(handle)
            assert form_of(restored) == expected and torch.equal(restored, values)
        assert (engine.stats.copied_in_bytes > 0) == is_on_host
        del handle, restored
    engine.close()
    assert not engine.device.hazards  # type: ignore[attr-defined]


def test_bytes_discarded_in_place_are_not_copied_and_not_returned(engine: OffloadEngine) -> None:
    """`resize_` leaves no trace in the version counter."""
    with engine.iteration():
        chunk, tensor = engine.start_chunk(), torch.ones(4)
        chunk.open_group("group")
        handle = chunk.tensor_push(tensor)
        tensor.untyped_storage().resize_(0)
        chunk.close_group()
        assert engine.stats.copied_out_bytes == 0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            chunk.tensor_pop(handle)
        del handle


def test_parts_of_a_workspace_that_is_filled_unseen_are_saves_of_their_own(engine: OffloadEngine) -> None:
    """By each layer and, once a handle is gone, by the next microbatch; the version counter shows no write."""
    with engine.iteration():
        chunk, arena = engine.start_chunk(), torch.zeros(2, SIDE)
        [gone] = save(chunk, [arena[0]])
        arena.data[1] = 2
        [kept] = save(chunk, [arena[1]])
        engine.device.synchronize_all()  # type: ignore[attr-defined]
        del gone
        arena.numpy()[0] = 1
        [again] = save(chunk, [arena[0]])
        assert (chunk.tensor_pop(again) == 1).all() and (chunk.tensor_pop(kept) == 2).all()
        del again, kept


def test_a_view_of_what_an_earlier_group_saved_is_not_copied_again(engine: OffloadEngine) -> None:
    x = torch.rand(SIDE, SIDE)
    with engine.iteration():
        chunk = engine.start_chunk()
        views = [x, x[2:4], x.view(-1), x.t(), x.expand(2, -1, -1), x[:, 1], x.view(torch.int32)]
        handles = [save(chunk, [view])[0] for view in views]
        assert all(torch.equal(chunk.tensor_pop(h), view) for h, view in zip(handles, views, strict=True))
        del handles
    assert engine.stats.copied_out_bytes == x.nbytes


@pytest.mark.parametrize(
    ("saved", "other", "is_covered"),
    [
        (lambda x: x, lambda x: x[3, 2:5], True),
        (lambda x: x[1:3], lambda x: x[2], True),
        (lambda x: x[1:3], lambda x: x[2:4], False),
        (lambda x: x[1:3], lambda x: x[:0], True),  # it has no bytes
        (lambda x: x[:0], lambda x: x[0], False),
        (lambda x: x.t(), lambda x: x[5], True),
        (lambda x: x[:, 2:4], lambda x: x[:, 4:6], True),  # parts of one split
        (lambda x: x[:3, 2:4], lambda x: x[5:, 4:6], False),  # one behind the other
        (lambda x: x[:, 2:4], lambda x: x[1, 4:6], False),  # between its bytes, and dense
        (lambda x: x[::2], lambda x: x[1], False),
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
        return torch.autograd.grad(total, x)[0]

    device = AdversarialDevice(seed)
    activations = manage_activations(engine=OffloadEngine(LATE, device), group_bytes=1)
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


def test_what_is_known_of_allocating_streams_ends_with_the_iteration() -> None:
    device = AdversarialDevice()
    engine = OffloadEngine(AT_ONCE, device)
    with device.compute_stream("comm") as comm:
        for _ in range(2):
            with engine.iteration():
                engine.set_allocation_stream(torch.ones(64), comm)
                assert len(engine._store.alloc_streams.streams) == 1
            assert not engine._store.alloc_streams.streams
        engine.set_allocation_stream(torch.ones(64), comm)  # outside of an iteration
        engine.begin_iteration()
        assert not engine._store.alloc_streams.streams
    engine.close()


def test_bytes_that_are_handed_over_are_not_resident_any_more(engine: OffloadEngine) -> None:
    with engine.iteration():
        chunk = engine.start_chunk()
        handles = save(chunk, [torch.ones(64)], GroupTraits(read_once=True))
        chunk.begin_backward()
        assert engine.meter is not None and engine.meter.current_bytes == 0
        tensor = chunk.tensor_pop(handles[0])
        assert engine.snapshot().resident_bytes == 0 == engine.meter.current_bytes and tensor.eq(1).all()
        handles.clear()
        assert engine.snapshot().saved_bytes == 0
