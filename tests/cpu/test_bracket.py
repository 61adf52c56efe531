# SPDX-License-Identifier: Apache-2.0
"""Brackets on plain modules: what they take, what they leave alone, and how they survive exceptions."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

pytest.importorskip("megatron.core")

import torch  # noqa: E402

from megatron_patches._hooks.attach import Attachment  # noqa: E402
from megatron_patches._model.sites import Site  # noqa: E402
from offload_engine import (  # noqa: E402
    OffloadConfig,
    OffloadEngine,
)
from offload_engine.schedule import no_pipelining  # noqa: E402


class Pair(NamedTuple):
    """An output of two tensors."""

    main: torch.Tensor
    extra: torch.Tensor | None


class Part(torch.nn.Module):
    """Saves its input, and gives it back multiplied in one of several shapes of output."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any] = lambda out: out) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, flag: object = None, *, hidden: torch.Tensor) -> Any:
        return self.wrap(hidden * hidden.sin())


class Around(torch.nn.Module):
    """A chunk that calls its part as `run` says."""

    def __init__(self, part: torch.nn.Module, run: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.part = part
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.part, x)


class Mlp(torch.nn.Module):
    """Two linears with an activation between them, as in Megatron; `fault` raises in the named place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1 = torch.nn.Linear(8, 8)
        self.linear_fc2 = torch.nn.Linear(8, 8)
        self.fault = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear_fc1(x)
        if self.fault:
            raise ArithmeticError("between the two")
        return self.linear_fc2(x.exp().tanh())


@pytest.fixture
def engine() -> Iterator[OffloadEngine]:
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=1, directory="none"))
    yield engine
    engine.close()


def attach(engine: OffloadEngine, chunk: torch.nn.Module, *sites: Site) -> Attachment:
    attachment = Attachment(engine, [chunk], ())
    attachment._attach_sites(chunk, sites)
    return attachment


def gradient(backward: Callable[[torch.Tensor], None]) -> torch.Tensor:
    x = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_()
    backward(x * 1)
    assert x.grad is not None
    return x.grad


def without(chunk: Callable[..., Any]) -> torch.Tensor:
    return gradient(lambda x: chunk(x).sum().backward())


def step(attachment: Attachment, chunk: Callable[..., Any]) -> torch.Tensor:
    """Forward, backward; returns the gradient of the input."""
    attachment.begin_iteration(())  # so that nothing is kept for a backward that comes at once
    with attachment.engine.iteration(no_pipelining(1)):
        return without(chunk)


def check_same_gradient(engine: OffloadEngine, chunk: torch.nn.Module, *sites: Site) -> Attachment:
    expected = without(chunk)
    attachment = attach(engine, chunk, *sites)
    assert torch.equal(step(attachment, chunk), expected)
    check_no_hook_in_force()
    return attachment


def check_no_hook_in_force() -> None:
    x = torch.ones(2, requires_grad=True)
    node: Any = (x * x).grad_fn
    assert node._saved_self is x, "a hook is still in force"


OUTPUTS = {
    "tensor": (lambda out: out, lambda out: out),
    "tuple": (lambda out: (None, out), lambda out: out[1]),
    "list": (lambda out: [out, None], lambda out: out[0]),
    "named tuple": (lambda out: Pair(out, None), lambda out: out.main),
}


PART = Site("part", "part", None)
FC1 = Site("fc1", "0.linear_fc1", None)
ACT = Site("act", "0.linear_fc1", "0.linear_fc2")
FC2 = Site("fc2", "0.linear_fc2", None)


@pytest.mark.parametrize("shape", OUTPUTS)
def test_keywords_and_every_shape_of_output(engine: OffloadEngine, shape: str) -> None:
    wrap, unwrap = OUTPUTS[shape]

    def run(part: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = part("flag", hidden=x)
        assert type(out) is type(wrap(x))
        return unwrap(out)

    attachment = check_same_gradient(engine, Around(Part(wrap), run), PART)
    assert engine.stats.num_offloaded_groups == 1 and attachment.num_groups == Counter(part=1)


def test_a_stretch_beside_the_brackets_of_its_ends(engine: OffloadEngine) -> None:
    attachment = check_same_gradient(engine, torch.nn.Sequential(Mlp()), FC1, ACT, FC2)
    assert attachment.num_groups == Counter(fc1=1, act=1, fc2=1)
    assert engine.stats.num_offloaded_groups == 2  # fc2 saves what act has saved before, and a view of its weight


def test_a_stretch_that_begins_twice_before_it_ends(engine: OffloadEngine) -> None:
    class Twice(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear_fc2((self.linear_fc1(x).exp() + self.linear_fc1(x.sin())).exp().tanh())

    check_same_gradient(engine, torch.nn.Sequential(Twice()), ACT)
    assert engine.stats.num_groups == 1 and engine.stats.num_offloaded_groups == 1


def test_an_exception_leaves_every_hook(engine: OffloadEngine) -> None:
    chunk: Any = torch.nn.Sequential(Mlp())
    expected = without(chunk)
    attachment = attach(engine, chunk, ACT)
    chunk[0].fault = True
    with pytest.raises(ArithmeticError):
        step(attachment, chunk)
    check_no_hook_in_force()
    chunk[0].fault = False
    assert torch.equal(step(attachment, chunk), expected)


def test_a_copy_of_the_model_does_not_copy_the_engine_and_closing_takes_every_hook_off(engine: OffloadEngine) -> None:
    chunk = torch.nn.Sequential(Mlp())
    attachment = attach(engine, chunk, FC1, ACT)
    twin = copy.deepcopy(chunk)
    assert torch.equal(without(twin), without(chunk))
    attachment.close()
    attachment.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in chunk.modules())


def test_names_that_a_step_never_calls_are_named(engine: OffloadEngine, caplog: pytest.LogCaptureFixture) -> None:
    attachment = Attachment(engine, [torch.nn.Identity()], ())
    attachment._unused_names = {"moe_act"}
    attachment.warn_of_unused_names()
    attachment.warn_of_unused_names()
    assert [record.message for record in caplog.records if "'moe_act'" in record.message] == [caplog.messages[0]]
