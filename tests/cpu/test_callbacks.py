# SPDX-License-Identifier: Apache-2.0
"""What the callbacks of trainers can be asked, and how they are undone. Their trainings: test_*_trainer.py."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from offload_engine import OffloadConfig, OffloadError, enable_activation_offloading
from tests.cpu.test_found_layers import Model
from tests.lookups import present

CONFIG = OffloadConfig(min_tensor_bytes=1, directory="none")
WIDTH = 16


class Module(Model):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


Begin = Callable[[Any, nn.Module], None]


def _begin_transformers(callback: Any, model: nn.Module) -> None:
    callback.on_train_begin(None, None, None, model=model)


def _begin_lightning(callback: Any, model: nn.Module) -> None:
    callback.on_train_start(SimpleNamespace(strategy=SimpleNamespace(model=model)), model)


@pytest.fixture(params=["transformers", "lightning"])
def trainer(request: pytest.FixtureRequest) -> tuple[Any, Begin]:
    """Return a callback, and what its trainer does when a training begins."""
    library = request.param
    pytest.importorskip(library, reason="pip install -e '.[integrations]' makes this run")
    callback = import_module(f"offload_engine.frontends.integrations.{library}").OffloadCallback(CONFIG)
    return callback, _begin_transformers if library == "transformers" else _begin_lightning


def num_hooks(model: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())


def test_the_handle_is_there_while_a_model_trains_also_where_the_last_one_raised(trainer: tuple[Any, Begin]) -> None:
    callback, begin = trainer
    first, second = Module(), Module()
    assert callback.handle is None
    begin(callback, first)
    begin(callback, first)
    first(torch.ones(8, WIDTH)).sum().backward()
    assert present(callback.handle).layers == ("layers.0", "layers.1", "layers.2", "layers.3")
    assert present(callback.handle).stats.num_groups == 4
    with pytest.raises(OffloadError, match="is already offloaded"):
        enable_activation_offloading(first, config=CONFIG)
    begin(callback, second)
    second(torch.ones(8, WIDTH)).sum().backward()
    assert num_hooks(second) > 0 == num_hooks(first) and "training_step" not in vars(first)
    callback.remove()
    callback.remove()
    assert num_hooks(second) == 0 and "training_step" not in vars(second)
    assert callback.handle is None and "moved" in callback.report()
    enable_activation_offloading(second, config=CONFIG).remove()
