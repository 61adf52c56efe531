# SPDX-License-Identifier: Apache-2.0
"""Small training steps that go through each front-end, on each device, and give the same numbers every time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from offload_engine import (
    CheckpointOffload,
    FixedBounds,
    GroupWindow,
    OffloadConfig,
    OffloadEngine,
    ResidentLayers,
    manage_activations,
    offload_wrapper,
)
from offload_engine import checkpoint as offloaded_checkpoint
from offload_engine._devices import CpuDevice
from offload_engine.frontends._layers.find_layers import find_layers
from offload_engine.frontends.layers import LayerOffload
from offload_engine.policies import PolicySettings
from tests.adversarial import AdversarialDevice
from tests.engine_state import in_group

WIDTH = 16
NUM_LAYERS = 4
DEVICES: dict[str, Callable[[], CpuDevice | AdversarialDevice]] = {
    "cpu": lambda: CpuDevice("none"),
    "late copies": AdversarialDevice,
    "early copies": lambda: AdversarialDevice(1),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.linear(x)) * x.cos()


class Model(nn.Module):
    """Runs its blocks; `checkpoint` may stand around each."""

    checkpoint: Callable[..., torch.Tensor] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.checkpoint is None else self.checkpoint(block, x, use_reentrant=False)
        return x


class Job(ABC):
    """A model, and an engine that moves its activations.

    Attributes:
        engine: None without offload.
    """

    policy: PolicySettings | None = None

    def __init__(self, device: CpuDevice | AdversarialDevice | None) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.x = torch.randn(8, WIDTH)
        self.device = device
        self.engine: OffloadEngine | None = None
        self.close: Callable[[], object] = lambda: None  # take the front-end off
        if device is not None:
            self.engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0, policy=self.policy), device)
            self.close = self.engine.close
        self.start()

    def step(self) -> list[torch.Tensor]:
        """Run a forward and a backward; return the output and all gradients."""
        self.model.zero_grad()
        return [self.train().detach(), *(p.grad for p in self.model.parameters() if p.grad is not None)]

    @abstractmethod
    def train(self) -> torch.Tensor:
        """Run forward and backward; return the loss."""

    def recover(self) -> None:
        """Do what a training loop does behind an exception: nothing for the front-ends, but much may be for torch."""
        torch.set_grad_enabled(True)  # an interrupt inside `no_grad` may leave it off

    @abstractmethod
    def start(self) -> None:
        """Put the front-end around the model."""


class ByHand(Job):
    """Two chunks with three groups each; the input of the second is held elsewhere."""

    policy: PolicySettings | None = FixedBounds(max_inflight_bytes=0)

    def start(self) -> None:
        self.held = self.x

    def train(self) -> torch.Tensor:
        if self.engine is None:
            return self._both(None)
        with self.engine.iteration():
            return self._both(self.engine)

    def recover(self) -> None:
        super().recover()
        if self.engine is not None:
            self.engine.reset_iteration()
            assert torch.equal(self.held, self.x), "a tensor that is held elsewhere did not get its bytes back"

    def _both(self, engine: OffloadEngine | None) -> torch.Tensor:
        self.held = self.x.clone()  # as a schedule keeps the input of a stage
        first = self._forward(engine, self.x * 1)
        second = self._forward(engine, self.held)
        first.backward()
        second.backward()
        return first.detach() + second.detach()

    def _forward(self, engine: OffloadEngine | None, x: torch.Tensor) -> torch.Tensor:
        if engine is None:
            for block in self.model.blocks:
                x = block(x)
            return x.sum()
        chunk, y = engine.start_chunk(), x
        for block in self.model.blocks:
            y = in_group(chunk, block, y)
            if x is self.held:
                engine.held_elsewhere(x)
        return y.sum()


class OfModel(Job):
    """A forward of the model inside a region, and its backward."""

    region: AbstractContextManager[object] = nullcontext()
    """Where there is an engine, of the front-end."""

    def train(self) -> torch.Tensor:
        with self.region:
            loss: torch.Tensor = self.model(self.x).sum()
        loss.backward()
        return loss


class Layers(OfModel):
    """`enable_activation_offloading`."""

    policy: PolicySettings | None = ResidentLayers()
    enable_ckpt = False

    def start(self) -> None:
        if self.engine is not None:
            layers = find_layers(self.model, list(self.model.blocks))
            self.close = LayerOffload(self.model, layers, self.engine, self.enable_ckpt).remove


class CheckpointedLayers(Layers):
    """The same with `enable_ckpt`."""

    enable_ckpt = True


class Managed(OfModel):
    """`manage_activations` around the forward."""

    def start(self) -> None:
        if self.engine is not None:
            self.region = activations = manage_activations(self.model, group_bytes=1000, engine=self.engine)
            self.close = activations.close


class Wrapped(OfModel):
    """`offload_wrapper`."""

    policy = GroupWindow(2)

    def start(self) -> None:
        apply_activation_checkpointing(self.model, check_fn=lambda module: isinstance(module, Block))
        if self.engine is not None:
            model: Any = offload_wrapper(self.model, engine=self.engine)
            self.close = model.activation_offload.remove


class Checkpointed(OfModel):
    """`checkpoint` inside a `CheckpointOffload`."""

    policy = GroupWindow(2)

    def start(self) -> None:
        self.model.checkpoint = torch_checkpoint
        if self.engine is not None:
            self.model.checkpoint = offloaded_checkpoint
            self.region = offload = CheckpointOffload(engine=self.engine)
            self.close = offload.close


JOBS: dict[str, type[Job]] = {
    "engine by hand": ByHand,
    "enable_activation_offloading": Layers,
    "enable_ckpt": CheckpointedLayers,
    "manage_activations": Managed,
    "offload_wrapper": Wrapped,
    "checkpoint": Checkpointed,
}
