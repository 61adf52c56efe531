# SPDX-License-Identifier: Apache-2.0
"""The head of a chunk whose backward comes at once: copies are in flight up to its logits, and come back after them."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest

pytest.importorskip("megatron.core")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from megatron_patches._hooks.attach import Attachment  # noqa: E402
from megatron_patches._hooks.held import is_input_of_others  # noqa: E402
from megatron_patches._model.sites import Site  # noqa: E402
from offload_engine import OffloadConfig, OffloadEngine  # noqa: E402
from offload_engine.schedule import Action, no_pipelining, parse_actions  # noqa: E402
from tests.adversarial import AdversarialDevice  # noqa: E402
from tests.engine_state import is_in_backward  # noqa: E402
from tests.lookups import present

NUM_LAYERS, WIDTH = 4, 8


class Chunk(torch.nn.Module):
    """Layers of two parts that save their inputs, and a head."""

    def __init__(self) -> None:
        super().__init__()
        parts = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(2 * NUM_LAYERS))
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(one, next(parts)) for one in parts)
        self.output_layer = torch.nn.Linear(WIDTH, 2)

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
    """Predicts a further token, and then the next one, with the same head.

    Attributes:
        logits: of both.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(x)
        self.logits = self.output_layer(hidden.cos()), self.output_layer(hidden)
        return self.logits[0] + self.logits[1]


@contextmanager
def attached(chunk: Chunk, actions: Sequence[Action] = tuple(no_pipelining(1))) -> Iterator[OffloadEngine]:
    """In an iteration of an engine whose copies complete when they are awaited."""
    device = AdversarialDevice(host_capacity=1 << 16)
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=1), device)
    attachment = Attachment(engine, [chunk], ())
    places = [(part, i, f"layers.{i}.{n}") for i in range(NUM_LAYERS) for n, part in enumerate(("first", "second"))]
    attachment._attach_sites(chunk, [Site(part, path, None, layer) for part, layer, path in places])
    attachment.begin_iteration(actions)
    with engine.iteration(actions):
        yield engine
    attachment.close()
    assert device.hazards == []


def forward(chunk: Chunk) -> torch.Tensor:
    return chunk(torch.ones(4, WIDTH, requires_grad=True) * 1)


def num_in_flight(engine: OffloadEngine) -> int:
    return len(engine.snapshot().leaving)


@pytest.mark.parametrize("kind", [Chunk, FusedLoss, TwoHeads])
def test_nothing_is_in_flight_behind_the_head_however_it_is_used(kind: type[Chunk]) -> None:
    chunk = kind()
    before: list[int] = []
    with attached(chunk) as engine:
        chunk.layers[-1].register_forward_hook(lambda module, args, output: before.append(num_in_flight(engine)))
        loss = forward(chunk).sum()
        assert before == [1] and num_in_flight(engine) == 0
        loss.backward()


def test_no_wait_in_front_of_a_loss_whose_backward_comes_later() -> None:
    with attached(chunk := Chunk(), parse_actions("F0.0 F0.1 B0.0 B0.1")) as engine:
        losses = [forward(chunk).sum()]
        assert num_in_flight(engine) == 2
        losses.append(forward(chunk).sum())
        for loss in losses:
            loss.backward()


def test_a_loss_ends_with_the_gradients_of_the_last_of_several_heads() -> None:
    chunk, seen = TwoHeads(), []
    with attached(chunk) as engine:
        loss = forward(chunk).sum()
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
        chunk.output_layer = torch.nn.Linear(WIDTH, 1)
        gc.collect()
        assert old() is None
        forward(chunk).sum().backward()


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
def test_who_may_read_the_input_of_a_decoder_later(
    config: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any], is_others: bool
) -> None:
    """What a schedule holds of it is emptied only where nobody may."""
    chunk: Any = SimpleNamespace(config=SimpleNamespace(**config))
    assert is_input_of_others(chunk, args, kwargs) == is_others
