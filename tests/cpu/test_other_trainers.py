# SPDX-License-Identifier: Apache-2.0
"""Examples for libraries that need a GPU, with stand-ins for what they import of these libraries."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

EXAMPLES = Path(__file__).parents[2] / "examples"
VERL = "verl.workers.engine.fsdp"


@pytest.fixture
def import_example(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Import an example beside stand-ins: attributes of modules by their names."""

    def import_it(example: str, stand_ins: dict[str, dict[str, Any]]) -> ModuleType:
        made: dict[str, ModuleType] = {}
        for name, attributes in stand_ins.items():
            parts = name.split(".")
            for package in (".".join(parts[:end]) for end in range(1, len(parts) + 1)):
                monkeypatch.setitem(sys.modules, package, made.setdefault(package, ModuleType(package)))
            vars(made[name]).update(attributes)
        spec = importlib.util.spec_from_file_location(example, EXAMPLES / f"{example}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, example, module)
        spec.loader.exec_module(module)
        return module

    return import_it


def test_a_verl_that_calls_something_else_is_refused(import_example: Callable[..., ModuleType]) -> None:
    with pytest.raises(ImportError, match="for verl 0.9"):
        import_example("with_verl", {VERL: {"transformer_impl": SimpleNamespace()}})


class Layers(nn.Module):
    """A model as torchtitan's: its layers are in a `ModuleDict`, by number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({str(i): nn.Sequential(nn.Linear(256, 256), nn.GELU()) for i in range(4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x

    def gradients(self) -> list[torch.Tensor]:
        self.zero_grad()
        self(torch.linspace(-1, 1, 2048 * 256).view(2048, 256)).square().mean().backward()
        return [weight.grad.clone() for weight in self.parameters() if weight.grad is not None]


class StandInTrainer:
    """What `OffloadTrainer` uses of torchtitan's Trainer."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        name: str

    def __init__(self, config: Config) -> None:
        self.config = config
        self.model_parts = [Layers()]
        self.parallel_dims = SimpleNamespace(pp_enabled=False)
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("checkpoint", [False, True])
def test_torchtitan_trains_with_offload(import_example: Callable[..., ModuleType], checkpoint: bool) -> None:
    registry = {name: lambda name=name: StandInTrainer.Config(name=name) for name in ("llama3_debugmodel", "llama3_8b")}
    stand_ins = {
        "torchtitan.trainer": {"Trainer": StandInTrainer},
        "torchtitan.models.llama3.config_registry": registry,
    }
    example = import_example("with_torchtitan", stand_ins)
    config = example.llama3_debugmodel()
    config.offload_checkpoint = checkpoint
    assert config.name == "llama3_debugmodel" and example.llama3_8b().name == "llama3_8b"
    trainer = example.OffloadTrainer(config)
    [model], [offload] = trainer.model_parts, trainer._offloads
    found = model.gradients()
    assert offload.stats.copied_out_bytes > 0
    trainer.close()
    assert trainer.is_closed and not any(layer._forward_hooks for layer in model.modules())
    assert all(map(torch.equal, found, Layers().gradients()))
