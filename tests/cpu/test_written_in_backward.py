# SPDX-License-Identifier: Apache-2.0
"""A backward writes into what it has saved: an error wherever another one would get other bytes than were saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from offload_engine import ChunkOffloadHandler, GroupTraits, OffloadConfig, OffloadEngine, ResidencyMeter
from offload_engine._compat.reads import read_plain
from offload_engine._saved.places import overlaps
from tests.adversarial import AdversarialDevice
from tests.engine_state import release_all

SIDE = 8
MODIFIED = "modified by an inplace operation"

View = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(params=["resident", "recalled", "on host"])
def where(request: pytest.FixtureRequest) -> str:
    """Where the bytes are when backward begins."""
    found: str = request.param
    return found


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[OffloadEngine]:
    device = AdversarialDevice()
    meter = ResidencyMeter()
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0), device, meter)
    # What the copy-out of a recalled storage delivers is not used, but the device does not know which it is.
    is_recalled = (
        request.node.callspec.params.get("where") == "recalled" if hasattr(request.node, "callspec") else False
    )
    with nullcontext() if is_recalled else device.observe_compute():
        yield engine
    engine.close()
    assert not device.hazards
    assert meter.current_bytes == 0


def saved_view(x: torch.Tensor, view: View) -> torch.Tensor:
    """Return a view that may be written with gradients enabled, as in a backward whose gradient has a graph."""
    found = view(x)
    return x if found is x else found.detach()


class Scratch(torch.autograd.Function):
    """Its backward writes into the view that it has saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, view: View, num_reads: int = 1) -> torch.Tensor:
        ctx.save_for_backward(saved_view(x, view))
        ctx.num_reads, ctx.view = num_reads, view
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        grad = grad.clone()
        for _ in range(ctx.num_reads):
            [scratch] = ctx.saved_tensors
            ctx.view(grad).copy_(scratch)
            scratch.mul_(2)
        return grad, None, None


class Reads(torch.autograd.Function):
    """Its backward reads the view that it has saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, view: View) -> torch.Tensor:
        ctx.save_for_backward(saved_view(x, view))
        ctx.view = view
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        grad = grad.clone()
        ctx.view(grad).copy_(ctx.saved_tensors[0])
        return grad, None


VIEWS: dict[str, View] = {
    "whole": lambda x: x,
    "part": lambda x: x[2:5],
    "transposed": torch.t,
    "flat": lambda x: x.view(-1),
    "integers": lambda x: x.view(torch.int32),
}

Make = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def scratch(x: torch.Tensor, view: str = "whole", num_reads: int = 1) -> torch.Tensor:
    return Scratch.apply(x, VIEWS[view], num_reads)


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


def save(chunk: ChunkOffloadHandler, tensors: Iterable[torch.Tensor], **traits: bool) -> list[Any]:
    """Save tensors in one group; return their handles."""
    chunk.open_group("module", GroupTraits(**traits))
    handles = [chunk.tensor_push(tensor) for tensor in tensors]
    chunk.close_group()
    return handles


def test_what_is_read_once_comes_back_anew(engine: OffloadEngine) -> None:
    """Its bytes stay on the host for a retained graph, so a write into what came back is none into what was saved."""
    with engine.iteration():
        chunk, x = engine.start_chunk(), torch.rand(SIDE, SIDE)
        expected = x.clone()
        [handle] = save(chunk, [x], read_once=True)
        del x
        release_all(engine)
        for _ in range(2):
            tensor = chunk.tensor_pop(handle)
            assert torch.equal(tensor, expected)
            tensor.mul_(2)
        del handle


FORMS: dict[str, View] = {
    "whole": lambda x: x,
    "conjugate": torch.conj,
    "negative": lambda x: x.conj().imag,
    "transposed": torch.t,
    "expanded": lambda x: x[:1].expand(4, -1),
}


@pytest.mark.parametrize("form", FORMS)
def test_handles_without_autograd(engine: OffloadEngine, where: str, form: str) -> None:
    with engine.iteration():
        chunk, x = engine.start_chunk(), torch.rand(SIDE, SIDE, dtype=torch.complex64)
        handle, other = save(chunk, [FORMS[form](x), FORMS[form](x)], keep=where == "resident")
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


@pytest.mark.parametrize("form", FORMS)
def test_what_others_hold_in_another_form(form: str) -> None:
    engine, x = OffloadEngine(OffloadConfig(min_tensor_bytes=0), AdversarialDevice()), torch.rand(SIDE, SIDE) * 1j
    other = x.detach()
    with engine.iteration():
        chunk = engine.start_chunk()
        [handle] = save(chunk, [FORMS[form](x)])
        release_all(engine)
        engine.held_elsewhere(x.view(-1))  # `other` is not told of, so the storage stays
        assert engine.stats.num_viewed_storages == 1
        tensor = chunk.tensor_pop(handle)
        assert torch.equal(tensor, FORMS[form](x)) and tensor._version == x._version
        (tensor if form != "expanded" else tensor[0]).mul_(2)
        with pytest.raises(RuntimeError, match=MODIFIED):
            chunk.tensor_pop(handle)
        del handle, other, tensor
    engine.close()


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
