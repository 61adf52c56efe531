# SPDX-License-Identifier: Apache-2.0
"""Which modules are taken for layers where a model names none; callbacks of trainers, and how they are undone."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from offload_engine import OffloadConfig, OffloadError, enable_activation_offloading
from offload_engine.frontends._layers.find_layers import find_layers
from tests.lookups import present

WIDTH = 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Mixture(nn.Module):
    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.relu(expert(x)) for expert in self.experts]).sum(dim=0)


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def by_turns() -> Model:
    return Model(Attention(), Mixture(), Attention(), Mixture())


def with_an_embedding() -> Model:
    """Whose embedding has more parameters than the layers, and is no reason to take the experts."""
    model = by_turns()
    model.embedding, model.head = nn.Embedding(9999, WIDTH), nn.Linear(WIDTH, 9999, bias=False)
    model.head.weight = model.embedding.weight
    return model


@pytest.mark.parametrize(
    ("make", "names", "told"),
    [
        (by_turns, "0 1 2 3", ""),
        (with_an_embedding, "0 1 2 3", ""),
        (
            lambda: Model(nn.Linear(WIDTH, WIDTH), Model(*(Attention() for _ in range(3))), nn.LayerNorm(WIDTH)),
            "1.layers.0 1.layers.1 1.layers.2",
            "",
        ),
        (lambda: Model(*(nn.ModuleList(Attention() for _ in range(n)) for n in (2, 3))), "1.0 1.1 1.2", ""),
        (
            lambda: Model(nn.Linear(WIDTH, 9 * WIDTH), Mixture(2)),
            "1.experts.0 1.experts.1",
            "layers.1.experts.0 to layers.1.experts.1, have 18% of the parameters of this Model",
        ),
    ],
    ids=["two classes by turns", "an embedding", "a trunk in a list", "lists in a list", "a small part is warned of"],
)
def test_which_layers_are_found(
    make: Callable[[], Model], names: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert [layer.name for layer in find_layers(make(), None)] == [f"layers.{name}" for name in names.split()]
    assert len(caplog.records) == bool(told) and told in caplog.text


# -- callbacks; their trainings: test_*_trainer.py --------------------------------------------------------------------

CONFIG = OffloadConfig(min_tensor_bytes=1, directory="none")


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
