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
from offload_engine._saved.places import covers, overlaps
from tests.adversarial import AdversarialDevice
from tests.engine_state import release_all

SIDE = 8
MODIFIED = "modified by an inplace operation"
AT_ONCE = OffloadConfig(min_tensor_bytes=0, policy=FixedBounds(max_inflight_bytes=0))  # what a group saves leaves then
LATE = OffloadConfig(min_tensor_bytes=0, policy=FixedBounds(max_inflight_bytes=1 << 30))


View = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def eager(device: AdversarialDevice) -> Iterator[OffloadEngine]:
    """Its copies are as late as the waits allow."""
    engine = OffloadEngine(AT_ONCE, device, ResidencyMeter())
    yield engine
    engine.close()


def save(chunk: ChunkOffloadHandler, tensors: Iterable[torch.Tensor], **traits: bool) -> list[Any]:
    """Save tensors in one group; return their handles."""
    chunk.open_group("group", GroupTraits(**traits))
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
def test_each_form_comes_back(form: str, is_on_host: bool, device: AdversarialDevice) -> None:
    """Twice, in the form that it had."""
    tensor, engine = FORMS[form](), OffloadEngine(OffloadConfig(min_tensor_bytes=0), device)
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


def test_bytes_discarded_in_place_are_not_copied_and_not_returned(eager: OffloadEngine) -> None:
    """`resize_` leaves no trace in the version counter."""
    with eager.iteration():
        chunk, tensor = eager.start_chunk(), torch.ones(4)
        chunk.open_group("group")
        handle = chunk.tensor_push(tensor)
        tensor.untyped_storage().resize_(0)
        chunk.close_group()
        assert eager.stats.copied_out_bytes == 0
        with pytest.raises(RuntimeError, match=MODIFIED):
            chunk.tensor_pop(handle)
        del handle


def test_parts_of_a_workspace_that_is_filled_unseen_are_saves_of_their_own(eager: OffloadEngine) -> None:
    """By each layer and, once a handle is gone, by the next microbatch; the version counter shows no write."""
    with eager.iteration():
        chunk, arena = eager.start_chunk(), torch.zeros(2, SIDE)
        [gone] = save(chunk, [arena[0]])
        arena.data[1] = 2
        [kept] = save(chunk, [arena[1]])
        eager.device.synchronize_all()  # type: ignore[attr-defined]
        del gone
        arena.numpy()[0] = 1
        [again] = save(chunk, [arena[0]])
        assert (chunk.tensor_pop(again) == 1).all() and (chunk.tensor_pop(kept) == 2).all()
        del again, kept


def test_a_view_of_what_an_earlier_group_saved_is_not_copied_again(eager: OffloadEngine) -> None:
    x = torch.rand(SIDE, SIDE)
    with eager.iteration():
        chunk = eager.start_chunk()
        views = [x, x[2:4], x.view(-1), x.t(), x.expand(2, -1, -1), x[:, 1], x.view(torch.int32)]
        handles = [save(chunk, [view])[0] for view in views]
        assert all(torch.equal(chunk.tensor_pop(h), view) for h, view in zip(handles, views, strict=True))
        del handles
    assert eager.stats.copied_out_bytes == x.nbytes


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
def test_a_place_covers_what_was_saved_or_split_with_it(saved: View, other: View, is_covered: bool) -> None:
    x = torch.zeros(SIDE, SIDE)
    assert covers(*(read_plain(part(x), x.device, 0)[5] for part in (saved, other))) == is_covered


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
    engine = OffloadEngine(LATE, AdversarialDevice())
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
        with pytest.raises(RuntimeError, match=MODIFIED):
            outputs[written].backward()
        del outputs


def test_a_part_is_written_while_the_whole_is_copied(device: AdversarialDevice) -> None:
    """The other part is as it was saved, and nothing is out of order."""

    def gradient_of(around: AbstractContextManager[Any]) -> torch.Tensor:
        x = torch.rand(SIDE, SIDE, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with around:
            saved, written = torch.unsafe_chunk(x * 2, 2)
            total = saved.sin().sum() + x.exp().sum()  # the second closes the group of the first
            total = total + written.mul_(3).cos().sum()
        return torch.autograd.grad(total, x)[0]

    activations = manage_activations(engine=OffloadEngine(LATE, device), group_bytes=1)
    expected = gradient_of(nullcontext())
    with device.observe_compute():
        assert torch.equal(gradient_of(activations), expected)
    activations.close()


def test_several_saves_of_a_storage_do_not_hold_its_bytes(eager: OffloadEngine) -> None:
    with eager.iteration():
        chunk = eager.start_chunk()
        *parts, outputs = save_parts(chunk)
        storage = StorageWeakRef(parts[0].untyped_storage())
        del parts
        chunk.close_group()
        release_all(eager)
        assert storage.expired()
        (outputs[0] + outputs[1]).backward()
        del outputs


def test_what_is_known_of_allocating_streams_ends_with_the_iteration(
    eager: OffloadEngine, device: AdversarialDevice
) -> None:
    with device.compute_stream("comm") as comm:
        for _ in range(2):
            with eager.iteration():
                assert not eager._store.alloc_streams.streams
                eager.set_allocation_stream(torch.ones(64), comm)
                assert len(eager._store.alloc_streams.streams) == 1
            assert not eager._store.alloc_streams.streams
            eager.set_allocation_stream(torch.ones(64), comm)  # outside of an iteration


def test_bytes_that_are_handed_over_are_not_resident_any_more(eager: OffloadEngine) -> None:
    with eager.iteration():
        chunk = eager.start_chunk()
        handles = save(chunk, [torch.ones(64)], read_once=True)
        chunk.begin_backward()
        assert eager.meter is not None and eager.meter.current_bytes == 0
        tensor = chunk.tensor_pop(handles[0])
        assert eager.snapshot().resident_bytes == 0 == eager.meter.current_bytes and tensor.eq(1).all()
        handles.clear()
        assert eager.snapshot().saved_bytes == 0


# A backward writes into what it has saved: an error wherever another one would get other bytes than were saved.


@pytest.fixture(params=["resident", "recalled", "on host"])
def where(request: pytest.FixtureRequest) -> str:
    """Where the bytes are when backward begins."""
    found: str = request.param
    return found


@pytest.fixture
def engine(where: str, device: AdversarialDevice) -> Iterator[OffloadEngine]:
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0), device, ResidencyMeter())
    # What the copy-out of a recalled storage delivers is not used, but the device does not know which it is.
    with nullcontext() if where == "recalled" else device.observe_compute():
        yield engine
    engine.close()
    assert engine.meter is not None and engine.meter.current_bytes == 0


class Reads(torch.autograd.Function):
    """Its backward reads the view that it has saved, and may write into it, each so many times."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, view: View, num_reads: int = 1, writes: bool = False) -> torch.Tensor:
        found = view(x)
        # A view that may be written with gradients enabled, as in a backward whose gradient has a graph.
        ctx.save_for_backward(x if found is x else found.detach())
        ctx.view, ctx.num_reads, ctx.writes = view, num_reads, writes
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        grad = grad.clone()
        for _ in range(ctx.num_reads):
            [saved] = ctx.saved_tensors
            ctx.view(grad).copy_(saved)
            if ctx.writes:
                saved.mul_(2)
        return grad, None, None, None


VIEWS: dict[str, View] = {
    "whole": lambda x: x,
    "part": lambda x: x[2:5],
    "transposed": torch.t,
    "flat": lambda x: x.view(-1),
    "integers": lambda x: x.view(torch.int32),
}

Make = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def scratch(x: torch.Tensor, view: str = "whole", num_reads: int = 1) -> torch.Tensor:
    return Reads.apply(x, VIEWS[view], num_reads, True)


def reads(x: torch.Tensor, view: str = "whole") -> torch.Tensor:
    return Reads.apply(x, VIEWS[view])


def gradients(make: Make, num_runs: int = 1, engine: OffloadEngine | None = None, where: str = "") -> list[Any]:
    """Run the backward of each of `make`'s outputs, the last one first; return gradients, "modified" for the others.

    With an engine one group saves all that the outputs need, and moves to `where`.
    """
    x = torch.rand(SIDE, SIDE, generator=torch.Generator().manual_seed(3)).requires_grad_()
    found: list[Any] = []
    with nullcontext() if engine is None else engine.iteration():
        outputs = make(x * 1) if engine is None else in_group(make, x * 1, engine, where)
        for output in (*reversed(outputs),) * num_runs:
            try:
                found.append(torch.autograd.grad(output.sum(), x, retain_graph=True)[0])
            except RuntimeError as error:
                assert MODIFIED in str(error) and (engine is None or "by group 0 (module) of chunk" in str(error))
                found.append("modified")
        if engine is not None:
            assert (engine.stats.copied_out_bytes > 0) == (where != "resident")
            assert (engine.stats.copied_in_bytes > 0) == (where == "on host")
        outputs = ()
    return found


def in_group(make: Make, x: torch.Tensor, engine: OffloadEngine, where: str) -> tuple[torch.Tensor, ...]:
    chunk = engine.start_chunk()
    chunk.open_group("module", GroupTraits(keep=where == "resident"))
    with chunk.saved_tensors_hooks():
        outputs = make(x)
    chunk.close_group()
    if where == "on host":
        del x
        release_all(engine)
    return outputs


def check_as_plain(make: Make, engine: OffloadEngine, where: str, num_runs: int = 1) -> list[Any]:
    expected, found = gradients(make, num_runs), gradients(make, num_runs, engine, where)
    for one, other in zip(found, expected, strict=True):
        assert one == other if isinstance(one, str) or isinstance(other, str) else torch.equal(one, other)
    return [one if isinstance(one, str) else "" for one in found]


# What saves a view, how often the backwards run, and what becomes of each.
CASES: dict[str, tuple[Callable[[torch.Tensor, str], tuple[torch.Tensor, ...]], int, list[str]]] = {
    "nobody else reads it": (lambda x, view: (scratch(x, view),), 1, [""]),
    "the writer comes last": (lambda x, view: (scratch(x, view), reads(x)), 1, ["", ""]),
    "a retained graph runs again": (lambda x, view: (scratch(x, view),), 3, ["", "modified", "modified"]),
    "a backward reads it again": (lambda x, view: (scratch(x, view, 2),), 1, ["modified"]),
    "a retained graph writes nothing": (lambda x, view: (reads(x, view), reads(x)), 3, [""] * 6),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("case", CASES)
def test_who_reads_it(engine: OffloadEngine, where: str, case: str, view: str) -> None:
    make, num_runs, expected = CASES[case]
    assert check_as_plain(lambda x: make(x, view), engine, where, num_runs) == expected


@pytest.mark.parametrize("read", VIEWS)
@pytest.mark.parametrize("written", VIEWS)
def test_another_node_reads_it_later(engine: OffloadEngine, where: str, written: str, read: str) -> None:
    assert check_as_plain(lambda x: (reads(x, read), scratch(x, written)), engine, where) == ["", "modified"]


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_with_counters_of_their_own(engine: OffloadEngine, where: str, dim: int) -> None:
    """One part is scratch, and the others are as they were saved."""

    def make(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = torch.unsafe_chunk(x, 2, dim)
        return reads(second), scratch(first), reads(first)

    assert check_as_plain(make, engine, where, num_runs=2) == ["", "", "", "modified", "modified", ""]


def test_parts_with_one_counter(engine: OffloadEngine, where: str) -> None:
    """Where the bytes have left, a reader of other bytes gets what was saved; autograd itself cannot tell."""

    def make(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return Reads.apply(x, lambda x: x[5:]), scratch(x, "part")

    expected = gradients(lambda x: (make(x)[0],))
    assert gradients(make)[1] == "modified"
    found = gradients(make, 1, engine, where)[1]
    assert torch.equal(found, expected[0]) if where == "on host" else found == "modified"


def test_what_is_read_once_comes_back_anew(eager: OffloadEngine) -> None:
    """Its bytes stay on the host for a retained graph, so a write into what came back is none into what was saved."""
    with eager.iteration():
        chunk, x = eager.start_chunk(), torch.rand(SIDE, SIDE)
        expected = x.clone()
        [handle] = save(chunk, [x], read_once=True)
        del x
        release_all(eager)
        for _ in range(2):
            tensor = chunk.tensor_pop(handle)
            assert torch.equal(tensor, expected)
            tensor.mul_(2)
        del handle


FORMS_TO_WRITE: dict[str, View] = {
    "whole": lambda x: x,
    "conjugate": torch.conj,
    "negative": lambda x: x.conj().imag,
    "transposed": torch.t,
    "expanded": lambda x: x[:1].expand(4, -1),
}


@pytest.mark.parametrize("form", FORMS_TO_WRITE)
def test_handles_without_autograd(engine: OffloadEngine, where: str, form: str) -> None:
    with engine.iteration():
        chunk, x = engine.start_chunk(), torch.rand(SIDE, SIDE, dtype=torch.complex64)
        handle, other = save(chunk, [FORMS_TO_WRITE[form](x), FORMS_TO_WRITE[form](x)], keep=where == "resident")
        if where == "on host":
            del x
            release_all(engine)
        first, second = chunk.tensor_pop(handle), chunk.tensor_pop(other)
        assert torch.equal(first, chunk.tensor_pop(handle)) and torch.equal(first, second)
        (second if form != "expanded" else second[0]).mul_(2)
        for each in (handle, other):
            with pytest.raises(RuntimeError, match=MODIFIED):
                chunk.tensor_pop(each)
        del handle, other


@pytest.mark.parametrize("form", FORMS_TO_WRITE)
def test_what_others_hold_in_another_form(form: str, eager: OffloadEngine) -> None:
    x = torch.rand(SIDE, SIDE) * 1j
    other = x.detach()
    with eager.iteration():
        chunk = eager.start_chunk()
        [handle] = save(chunk, [FORMS_TO_WRITE[form](x)])
        release_all(eager)
        eager.held_elsewhere(x.view(-1))  # `other` is not told of, so the storage stays
        assert eager.stats.num_viewed_storages == 1
        tensor = chunk.tensor_pop(handle)
        assert torch.equal(tensor, FORMS_TO_WRITE[form](x)) and tensor._version == x._version
        (tensor if form != "expanded" else tensor[0]).mul_(2)
        with pytest.raises(RuntimeError, match=MODIFIED):
            chunk.tensor_pop(handle)
        del handle, other, tensor


@pytest.mark.parametrize(
    ("first", "second", "do_overlap"),
    [
        (lambda x: x, lambda x: x[3, 2:5], True),
        (lambda x: x[1:3], lambda x: x[3:], False),
        (lambda x: x[1:3], lambda x: x[2:4], True),
        (lambda x: x[1:3], lambda x: x[2:2], False),
        (lambda x: x[:, :4], lambda x: x[:, 4:], False),
        (lambda x: x[:, :4], lambda x: x[:, 3:5], True),
        (lambda x: x[:, :4], lambda x: x[2, 3:], True),
        (lambda x: x[:, 6:], lambda x: x.view(-1)[8:10], False),
        (lambda x: x[:, 6:], lambda x: x.view(-1)[14:18], True),
        (lambda x: x[::2], lambda x: x[1::2], False),
        (lambda x: x.view(4, 2, 8)[:, 0], lambda x: x.view(4, 2, 8)[:, 1, 2:], False),
        (lambda x: x.view(4, 2, 8)[:, 0], lambda x: x[:, 1], True),
        (lambda x: x[:, :4].view(torch.int16), lambda x: x[:, 4:], False),
        (lambda x: x[:, :5].view(torch.int16), lambda x: x[:, 4:], True),
        (lambda x: x[:1].expand(4, 8), lambda x: x[1], False),
    ],
)
def test_overlap(first: View, second: View, do_overlap: bool) -> None:
    x = torch.zeros(SIDE, SIDE)
    one, other = (read_plain(view(x), x.device, 0)[5] for view in (first, second))
    assert overlaps(one, other) == overlaps(other, one) == do_overlap
