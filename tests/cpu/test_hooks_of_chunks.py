# SPDX-License-Identifier: Apache-2.0
"""Hooks that pause, so that what is saved meanwhile is autograd's alone, and hooks that leave autograd's stack."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from offload_engine import OffloadEngine
from offload_engine._compat import torch_private
from offload_engine._compat.own_hooks import OwnHooks, pop_own
from tests.cpu.test_engine import NUMEL, check_nothing_left, leaf, make_engine


@pytest.fixture
def engine() -> Iterator[OffloadEngine]:
    engine = make_engine()
    yield engine
    engine.close()


def innermost_hooks() -> Any:
    return torch_private.innermost_hooks(True)


@pytest.fixture(autouse=True)
def empty_stack() -> Iterator[None]:
    assert innermost_hooks() is None
    yield
    while innermost_hooks() is not None:
        torch_private.pop_hooks()


class SaveInOrder(torch.autograd.Function):
    """Saves some tensors in their order, and gives `x` back times their total."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return x * _total(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * _total(ctx.saved_tensors), None


def _total(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.sum() for tensor in tensors]).sum()


def test_tensors_saved_while_the_hooks_pause_are_left_to_autograd(engine: OffloadEngine) -> None:
    assert engine.meter is not None
    x = leaf()
    plain = torch.autograd.grad((x * 1).exp().sin().sum(), x)[0]
    with engine.iteration():
        chunk = engine.start_chunk()
        with chunk.hooks.around_groups():
            assert chunk.hooks.pause_around_groups() and innermost_hooks() is None
            inner = (x * 1).exp()
            chunk.hooks.resume()
            assert engine.meter.current_bytes == 0
            total = inner.sin().sum()
            assert engine.meter.current_bytes == 4 * NUMEL
        assert torch.equal(torch.autograd.grad(total, x)[0], plain)
        del inner, total
    check_nothing_left(engine)


@pytest.mark.parametrize("is_whole", [True, False], ids=["the whole", "its parts, of which one would keep it"])
def test_hooks_pause_behind_the_whole_of_a_tensor(engine: OffloadEngine, is_whole: bool) -> None:
    """Those of all groups around pause, whatever was saved in front of it."""
    x = leaf()
    first, whole, last = (torch.rand(NUMEL) for _ in range(3))
    saved = [first, whole, last] if is_whole else [first, *whole.chunk(2), last]
    plain = torch.autograd.grad(SaveInOrder.apply(x, saved).sum(), x)[0]
    with engine.iteration():
        chunk = engine.start_chunk()
        with chunk.hooks.around_groups():
            outer = chunk.open_group("outer")
            with chunk.saved_tensors_hooks():
                inner = chunk.open_group("inner")
                with chunk.saved_tensors_hooks():
                    before = innermost_hooks()
                    assert chunk.hooks.pause_behind(whole.view(2, -1))
                    total = SaveInOrder.apply(x, saved).sum()
                    assert (innermost_hooks() is None) == is_whole
                    chunk.hooks.resume()
                    assert innermost_hooks() == before
                chunk.close_group()
            chunk.close_group()
        packed = {each.untyped_storage()._cdata for each in ((first, whole) if is_whole else (first, whole, last))}
        assert {each.key for each in inner.storages} == packed and not outer.storages
        del first, whole, last
        saved.clear()
        assert torch.equal(torch.autograd.grad(total, x)[0], plain)
        del total
    check_nothing_left(engine)


@pytest.mark.parametrize("innermost", ["none", "other hooks", "another chunk", "a pause that waits", "a group"])
def test_hooks_do_not_pause_under_others(engine: OffloadEngine, innermost: str) -> None:
    """Under a group they do, behind a tensor."""
    with engine.iteration(), contextlib.ExitStack() as stack:
        chunk = engine.start_chunk()
        contexts: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
            "other hooks": torch.autograd.graph.save_on_cpu,
            "another chunk": engine.start_chunk().hooks.around_groups,
            "a group": chunk.saved_tensors_hooks,
        }
        if innermost != "none":
            stack.enter_context(chunk.hooks.around_groups())
        if innermost in contexts:
            stack.enter_context(contexts[innermost]())
        if innermost == "a pause that waits":
            assert chunk.hooks.pause_behind(torch.rand(NUMEL))
            stack.callback(chunk.hooks.resume)
        before = innermost_hooks()
        assert not chunk.hooks.pause_around_groups()
        assert innermost == "a group" or not chunk.hooks.pause_behind(torch.rand(NUMEL))
        assert innermost_hooks() == before


# ---- hooks that leave autograd's stack by what they are ----


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def other(x: torch.Tensor) -> torch.Tensor:
    return x


def test_hooks_leave_those_of_others_alone() -> None:
    """Also where another has left its own on top, as a generator of torch's checkpoint before it is freed."""
    with OwnHooks(same, same):
        torch_private.push_hooks(other, other)
    assert innermost_hooks() == (other, other)
    torch_private.pop_hooks()
    assert innermost_hooks() is None
    with OwnHooks(other, other):
        with OwnHooks(same, same):
            pop_own(lambda unpack: unpack is same)
        assert innermost_hooks() == (other, other)
    assert innermost_hooks() is None
