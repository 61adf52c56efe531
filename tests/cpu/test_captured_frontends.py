# SPDX-License-Identifier: Apache-2.0
"""A step of each front-end is captured as a whole, on a device that knows what a capture refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from offload_engine import (
    CheckpointOffload,
    LowestPeak,
    OffloadConfig,
    OffloadEngine,
    OffloadError,
    enable_activation_offloading,
    offload_wrapper,
)
from offload_engine.frontends import layers as frontend
from tests.graph_device import GraphDevice

WIDTH, NUM_LAYERS, NUM_MICROBATCHES = 32, 6, 2
CONFIG = OffloadConfig(min_tensor_bytes=1, policy=LowestPeak())


@pytest.fixture
def device() -> Iterator[GraphDevice]:
    device = GraphDevice()
    with device.observe_compute():
        yield device
    assert not device.hazards


class Model(torch.nn.Module):
    """Checkpoints its layers as Hugging Face's models do, where a front-end wants that."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(NUM_LAYERS)
        )
        self.gradient_checkpointing = False
        self._gradient_checkpointing_func: Callable[..., Any] = torch_checkpoint
        self.offload: CheckpointOffload | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.gradient_checkpointing:
                hidden = self._gradient_checkpointing_func(layer, hidden, use_reentrant=False)
            else:
                hidden = layer(hidden) if self.offload is None else self.offload.checkpoint(layer, hidden)
        return hidden


def enable(model: Model, device: GraphDevice, enable_ckpt: bool = False) -> OffloadEngine:
    with mock.patch.object(frontend, "device_for", lambda *_: device):
        return enable_activation_offloading(model, enable_ckpt=enable_ckpt, config=CONFIG).engine


def enable_checkpointed(model: Model, device: GraphDevice) -> OffloadEngine:
    return enable(model, device, enable_ckpt=True)


def wrap(model: Model, device: GraphDevice) -> OffloadEngine:
    model.gradient_checkpointing = True
    engine = OffloadEngine(CONFIG, device)
    offload_wrapper(model, engine=engine)
    return engine


def checkpoint(model: Model, device: GraphDevice) -> OffloadEngine:
    model.offload = CheckpointOffload(engine=OffloadEngine(CONFIG, device))
    return model.offload.engine


def step(model: Model) -> list[torch.Tensor]:
    model.zero_grad()
    generator = torch.Generator().manual_seed(1)
    for _ in range(NUM_MICROBATCHES):
        hidden = torch.randn(16, WIDTH, generator=generator, requires_grad=True)
        model(hidden).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("put_on", [enable, enable_checkpointed, wrap, checkpoint])
def test_a_step_is_captured(put_on: Callable[[Model, GraphDevice], OffloadEngine], device: GraphDevice) -> None:
    expected, model = step(Model()), Model()
    engine = put_on(model, device)
    for _ in range(2):
        assert all(map(torch.equal, expected, step(model)))
    copies = device.num_copies.total()
    with engine.graphs.capture(device.graph()) as captured:
        assert all(map(torch.equal, expected, step(model)))
    assert engine.stats.copied_in_bytes > 0 and device.num_copies.total() > copies and captured.host_bytes > 0
    assert all(map(torch.equal, expected, step(model)))
    with pytest.raises(OffloadError, match="captured steps still use"):
        engine.close()
    captured.release()
    engine.close()
