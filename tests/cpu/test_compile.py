# SPDX-License-Identifier: Apache-2.0
"""torch.compile inside and around offloaded regions: the same bits as compiled without offload, or a clear refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from offload_engine import (
    FixedBounds,
    ManagedActivations,
    OffloadConfig,
    OffloadEngine,
    OffloadError,
    manage_activations,
    offload_wrapper,
)
from tests.adversarial import AdversarialDevice
from tests.lookups import present

WIDTH, ROWS, DEPTH = 32, 16, 6
TENSOR_BYTES = WIDTH * ROWS * 4

Region = Callable[[], AbstractContextManager[Any]]


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    """Nothing compiled before, and nothing left over."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def activations(device: AdversarialDevice) -> Iterator[ManagedActivations]:
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0, policy=FixedBounds(max_inflight_bytes=0)), device)
    activations = manage_activations(group_bytes=2 * TENSOR_BYTES, engine=engine)
    yield activations
    activations.close()


class Layer(nn.Sequential):
    """With a forward outside of torch: `nn.Sequential`'s own is not compiled before torch 2.15."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x)


def make_model() -> nn.Sequential:
    torch.manual_seed(7)
    layers = [Layer(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(DEPTH)]
    return nn.Sequential(*layers)


def train(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], region: Region) -> list[torch.Tensor]:
    losses = []
    for step in range(3):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        with region():
            loss = call(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *[p.grad for p in model.parameters() if p.grad is not None]]


def compiled(what: str, region: Region) -> list[torch.Tensor]:
    """Train with compiled layers, a compiled model, or a compiled function between eager ones that is called twice."""
    model = make_model()
    if what == "layers":
        for layer in model:
            layer.compile(backend="aot_eager")
        return train(model, model, region)
    if what == "model":
        return train(model, torch.compile(model, backend="aot_eager"), region)
    middle = torch.compile(lambda x: model[2](model[1](x)).sin(), backend="aot_eager")
    return train(model, lambda x: model[3](middle(middle(model[0](x))).exp()), region)


@pytest.mark.parametrize("what", ["layers", "model", "part"])
def test_parity_without_a_graph_break(what: str, device: AdversarialDevice, activations: ManagedActivations) -> None:
    expected = compiled(what, nullcontext)
    torch._dynamo.reset()
    counters.clear()
    found = compiled(what, lambda: activations)
    assert counters["stats"]["unique_graphs"] and not counters["graph_break"]
    assert len(expected) == len(found) > DEPTH and all(map(torch.equal, expected, found))
    assert device.num_copies["out"] and device.num_copies["in"] and not activations.engine.has_saved
    if what == "layers":  # they come back ahead of their use
        assert activations.stats.prefetch_misses == 0
        assert activations.stats.peak_resident_bytes < activations.stats.managed_bytes / 2
    if what == "model":  # which needs everything at once
        assert activations.stats.prefetch_misses > DEPTH


def test_a_model_that_is_compiled_as_a_whole_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    manage_activations(make_model())
    assert not caplog.text
    compiled: Any
    for compiled in (torch.compile(make_model()), make_model()):
        compiled.compile()
        caplog.clear()
        manage_activations(compiled)
        assert "is compiled as a whole" in caplog.text


def checkpointed(is_offloaded: bool, what: str, rows: list[int]) -> list[torch.Tensor]:
    """Gradients of layers that are compiled inside their checkpoints, with them, or as a model."""
    torch._dynamo.reset()
    model: Any = make_model()
    if what == "inside":
        for layer in model:
            layer.compile(backend="aot_eager")
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Layer))
    config = OffloadConfig(min_tensor_bytes=0, directory="none")
    if is_offloaded:
        offload_wrapper(model, activation_loading_horizon=2, config=config)
    if what == "with":
        for layer in model:
            layer.compile(backend="aot_eager")
    call = torch.compile(model, backend="aot_eager") if what == "model" else model
    for num_rows in rows:
        call(torch.ones(num_rows, WIDTH)).sum().backward()
    if is_offloaded:
        assert model.activation_offload.stats.copied_out_bytes > 0
        model.activation_offload.remove()
    return [present(p.grad) for p in model.parameters()]


@pytest.mark.parametrize("rows", [[ROWS] * 3, [ROWS, ROWS + 1, ROWS + 2]], ids=["one shape", "many"])
def test_checkpoints_around_compiled_layers(rows: list[int]) -> None:
    expected, found = (checkpointed(is_offloaded, "inside", rows) for is_offloaded in (False, True))
    assert counters["stats"]["unique_graphs"]
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("what", ["with", "model"])
def test_offloaded_checkpoints_inside_compiled_code_are_refused(what: str) -> None:
    """Traced, the engine itself would be compiled: other bits, and errors from inside the compiler."""
    with pytest.raises(OffloadError, match="a checkpoint that offloads its inputs is inside a function that torch."):
        checkpointed(True, what, [ROWS])


def test_entering_inside_compiled_code_is_refused_unless_that_is_not_compiled(activations: ManagedActivations) -> None:
    model, x = make_model(), torch.ones(ROWS, WIDTH)

    def call(x: torch.Tensor) -> torch.Tensor:
        with activations:
            return model(x)

    with pytest.raises(OffloadError, match="inside a function that torch.compile compiles. Put it around the call"):
        torch.compile(call, backend="eager")(x)
    with activations:  # what the message says to do
        loss = torch.compile(model, backend="eager")(x).sum()
    loss.backward()
    not_compiled = torch.compiler.disable(call)
    loss = torch.compile(lambda x: not_compiled(x.sin()).cos(), backend="aot_eager")(x).sum()
    assert activations.stats.managed_bytes > 0
    loss.backward()
