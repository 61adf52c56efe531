# SPDX-License-Identifier: Apache-2.0
"""Hooks on plain modules: brackets, what they leave alone and how they survive exceptions; the head of a chunk."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import ref

import pytest

pytest.importorskip("megatron.core")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from megatron_patches._hooks.attach import Attachment  # noqa: E402
from megatron_patches._hooks.held import is_input_of_others  # noqa: E402
from megatron_patches._model.sites import Site  # noqa: E402
from offload_engine import OffloadConfig, OffloadEngine  # noqa: E402
from offload_engine.schedule import no_pipelining, parse_actions  # noqa: E402
from tests.adversarial import AdversarialDevice  # noqa: E402
from tests.engine_state import is_in_backward  # noqa: E402
from tests.lookups import present  # noqa: E402

NUM_LAYERS, WIDTH = 4, 8


class Mlp(nn.Module):
    """Two linears with an activation between them, as in Megatron; `fault` raises between the two."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(WIDTH, WIDTH)
        self.linear_fc2 = nn.Linear(WIDTH, WIDTH)
        self.fault = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear_fc1(x)
        if self.fault:
            raise ArithmeticError
        return self.linear_fc2(x.exp().tanh())


FC1 = Site("fc1", "0.linear_fc1", None)
ACT = Site("act", "0.linear_fc1", "0.linear_fc2")
FC2 = Site("fc2", "0.linear_fc2", None)


@pytest.fixture
def engine() -> Iterator[OffloadEngine]:
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=1, directory="none"))
    yield engine
    engine.close()


def attach(engine: OffloadEngine, chunk: nn.Module, *sites: Site) -> Attachment:
    attachment = Attachment(engine, [chunk], ())
    attachment._attach_sites(chunk, sites)
    return attachment


def gradient(chunk: nn.Module) -> torch.Tensor:
    x = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH).requires_grad_()
    chunk(x * 1).sum().backward()
    return present(x.grad)


def step(attachment: Attachment, chunk: nn.Module) -> torch.Tensor:
    """Forward, backward; returns the gradient of the input."""
    attachment.begin_iteration(())  # so that nothing is kept for a backward that comes at once
    with attachment.engine.iteration(no_pipelining(1)):
        return gradient(chunk)


def check_same_gradient(engine: OffloadEngine, chunk: nn.Module, *sites: Site) -> Attachment:
    expected = gradient(chunk)
    attachment = attach(engine, chunk, *sites)
    assert torch.equal(step(attachment, chunk), expected)
    check_no_hook_in_force()
    return attachment


def check_no_hook_in_force() -> None:
    x = torch.ones(2, requires_grad=True)
    node: Any = (x * x).grad_fn
    assert node._saved_self is x, "a hook is still in force"


class Pair(NamedTuple):
    main: torch.Tensor
    extra: torch.Tensor | None


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda out: out, lambda out: out),
        (lambda out: (None, out), lambda out: out[1]),
        (lambda out: [out, None], lambda out: out[0]),
        (lambda out: Pair(out, None), lambda out: out.main),
    ],
    ids=["tensor", "tuple", "list", "named tuple"],
)
def test_keywords_and_every_shape_of_output(
    engine: OffloadEngine, wrap: Callable[[torch.Tensor], Any], unwrap: Callable[[Any], torch.Tensor]
) -> None:
    class Part(nn.Module):
        def forward(self, flag: object = None, *, hidden: torch.Tensor) -> Any:
            return wrap(hidden * hidden.sin())

    class Around(nn.ModuleDict):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self["part"]("flag", hidden=x)
            assert type(out) is type(wrap(x))
            return unwrap(out)

    attachment = check_same_gradient(engine, Around({"part": Part()}), Site("part", "part", None))
    assert engine.stats.num_offloaded_groups == 1 and attachment.num_groups == Counter(part=1)


def test_a_stretch_beside_the_brackets_of_its_ends(engine: OffloadEngine) -> None:
    attachment = check_same_gradient(engine, nn.Sequential(Mlp()), FC1, ACT, FC2)
    assert attachment.num_groups == Counter(fc1=1, act=1, fc2=1)
    assert engine.stats.num_offloaded_groups == 2  # fc2 saves what act has saved before, and a view of its weight


def test_a_stretch_that_begins_twice_before_it_ends(engine: OffloadEngine) -> None:
    class Twice(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear_fc2((self.linear_fc1(x).exp() + self.linear_fc1(x.sin())).exp().tanh())

    check_same_gradient(engine, nn.Sequential(Twice()), ACT)
    assert engine.stats.num_groups == 1 and engine.stats.num_offloaded_groups == 1


def test_an_exception_leaves_every_hook(engine: OffloadEngine) -> None:
    chunk: Any = nn.Sequential(Mlp())
    expected = gradient(chunk)
    attachment = attach(engine, chunk, ACT)
    chunk[0].fault = True
    with pytest.raises(ArithmeticError):
        step(attachment, chunk)
    check_no_hook_in_force()
    chunk[0].fault = False
    assert torch.equal(step(attachment, chunk), expected)


def test_a_copy_of_the_model_does_not_copy_the_engine_and_closing_takes_every_hook_off(engine: OffloadEngine) -> None:
    chunk = nn.Sequential(Mlp())
    attachment = attach(engine, chunk, FC1, ACT)
    assert torch.equal(gradient(copy.deepcopy(chunk)), gradient(chunk))
    attachment.close()
    attachment.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in chunk.modules())


# -- the head, whose backward comes at once: copies are in flight up to its logits, and come back after them -----------


class Chunk(nn.Module):
    """Layers of two parts that save their inputs, and a head."""

    def __init__(self) -> None:
        super().__init__()
        parts = (nn.Linear(WIDTH, WIDTH) for _ in range(2 * NUM_LAYERS))
        self.layers = nn.ModuleList(nn.Sequential(one, next(parts)) for one in parts)
        self.output_layer = nn.Linear(WIDTH, 2)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output_layer(self.hidden(x))


class FusedLoss(Chunk):
    """Takes the weight of the head and does not call it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.hidden(x), self.output_layer.weight, self.output_layer.bias)


class TwoHeads(Chunk):
    """Predicts a further token, and then the next one, with the same head."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(x)
        self.logits = self.output_layer(hidden.cos()), self.output_layer(hidden)
        return self.logits[0] + self.logits[1]


@contextmanager
def attached(chunk: Chunk, actions: Sequence[Any] = tuple(no_pipelining(1))) -> Iterator[OffloadEngine]:
    """In an iteration of an engine whose copies complete when they are awaited."""
    device = AdversarialDevice(host_capacity=1 << 16)
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=1), device)
    places = [(part, i, f"layers.{i}.{n}") for i in range(NUM_LAYERS) for n, part in enumerate(("first", "second"))]
    attachment = attach(engine, chunk, *(Site(part, path, None, layer) for part, layer, path in places))
    attachment.begin_iteration(actions)
    with engine.iteration(actions):
        yield engine
    attachment.close()
    assert device.hazards == []


def forward(chunk: Chunk) -> torch.Tensor:
    return chunk(torch.ones(4, WIDTH, requires_grad=True) * 1).sum()


def num_in_flight(engine: OffloadEngine) -> int:
    return len(engine.snapshot().leaving)


@pytest.mark.parametrize("kind", [Chunk, FusedLoss, TwoHeads])
def test_nothing_is_in_flight_behind_the_head_however_it_is_used(kind: type[Chunk]) -> None:
    chunk = kind()
    before: list[int] = []
    with attached(chunk) as engine:
        chunk.layers[-1].register_forward_hook(lambda module, args, output: before.append(num_in_flight(engine)))
        loss = forward(chunk)
        assert before == [1] and num_in_flight(engine) == 0
        loss.backward()


def test_no_wait_in_front_of_a_loss_whose_backward_comes_later() -> None:
    with attached(chunk := Chunk(), parse_actions("F0.0 F0.1 B0.0 B0.1")) as engine:
        losses = [forward(chunk)]
        assert num_in_flight(engine) == 2
        losses.append(forward(chunk))
        for loss in losses:
            loss.backward()


def test_a_loss_ends_with_the_gradients_of_the_last_of_several_heads() -> None:
    chunk, seen = TwoHeads(), []
    with attached(chunk) as engine:
        loss = forward(chunk)
        policy: Any = engine._executor.policy
        key, window = present(engine.current_chunk).key, policy._window
        for name, logits in zip(("further", "next"), chunk.logits, strict=True):
            logits.register_hook(lambda _, name=name: seen.append((name, is_in_backward(window, key))))
        loss.backward()
    assert seen == [("next", False), ("further", True)]


def test_a_head_that_is_replaced_goes() -> None:
    chunk = Chunk()
    with attached(chunk):
        old = ref(chunk.output_layer)
        chunk.output_layer = nn.Linear(WIDTH, 1)
        gc.collect()
        assert old() is None
        forward(chunk).backward()


@pytest.mark.parametrize(
    ("config", "args", "kwargs", "is_others"),
    [
        ({}, (), {}, False),
        ({}, (), {"output_processor": None, "decoder_input": None}, False),
        ({}, (), {"output_processor": lambda *_: None}, True),
        ({}, (), {"decoder_input": torch.ones(1)}, True),
        ({}, (None, None, None, torch.ones(1)), {}, True),
        ({"config_logger_dir": "/tmp"}, (), {}, True),
    ],
)
def test_inputs_that_others_may_read_stay(
    config: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any], is_others: bool
) -> None:
    chunk: Any = SimpleNamespace(config=SimpleNamespace(**config))
    assert is_input_of_others(chunk, args, kwargs) == is_others
