# SPDX-License-Identifier: Apache-2.0
"""Which modules are taken for the layers of a model that does not name them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offload_engine import OffloadConfig, enable_activation_offloading
from offload_engine.frontends._layers.find_layers import find_layers

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


def names(model: nn.Module) -> list[str]:
    return [layer.name for layer in find_layers(model, None)]


def test_layers_of_two_classes_by_turns() -> None:
    model = by_turns()
    handle = enable_activation_offloading(model, config=OffloadConfig(min_tensor_bytes=1, directory="none"))
    assert handle.layers == ("layers.0", "layers.1", "layers.2", "layers.3")
    model(torch.ones(2, WIDTH)).sum().backward()
    assert handle.stats.num_groups == 4
    handle.remove()


def test_an_embedding_is_no_reason_to_take_the_experts(caplog: pytest.LogCaptureFixture) -> None:
    model = by_turns()
    model.embedding = nn.Embedding(9999, WIDTH)
    model.head = nn.Linear(WIDTH, 9999, bias=False)
    model.head.weight = model.embedding.weight
    assert names(model) == ["layers.0", "layers.1", "layers.2", "layers.3"] and not caplog.records


def test_a_stem_a_trunk_and_a_head_in_a_list_are_no_layers(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(nn.Linear(WIDTH, WIDTH), Model(*(Attention() for _ in range(3))), nn.LayerNorm(WIDTH))
    assert names(model) == ["layers.1.layers.0", "layers.1.layers.1", "layers.1.layers.2"] and not caplog.records


def test_lists_in_a_list_are_no_layers() -> None:
    model = Model(*(nn.ModuleList(Attention() for _ in range(n)) for n in (2, 3)))
    assert names(model) == ["layers.1.0", "layers.1.1", "layers.1.2"]


def test_a_small_part_of_the_model_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(nn.Linear(WIDTH, 9 * WIDTH), Mixture(2))
    assert names(model) == ["layers.1.experts.0", "layers.1.experts.1"]
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "the layers that were found, layers.1.experts.0 to layers.1.experts.1, have 18% of the parameters of this Model"
    )
    assert "layers=[...]" in record.getMessage()
