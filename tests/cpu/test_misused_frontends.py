# SPDX-License-Identifier: Apache-2.0
"""Misuse of a front-end is an error that says what was passed and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from offload_engine import (
    CheckpointOffload,
    OffloadConfig,
    OffloadError,
    ResidentLayers,
    enable_activation_offloading,
    manage_activations,
)
from offload_engine.frontends.integrations._training import config_of
from tests.cpu.test_found_layers import Model

CONFIG = OffloadConfig(min_tensor_bytes=1, directory="none")
WIDTH = 8
NOT_A_MODULE: Any = CONFIG
A_POLICY: Any = ResidentLayers(3)


class Net(Model):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def data() -> torch.Tensor:
    return torch.ones(2, WIDTH, requires_grad=True)


def test_a_policy_among_settings() -> None:
    with pytest.raises(TypeError, match=r"policy=ResidentLayers\(.*3.*\) .* goes into OffloadConfig\(policy=\.\.\.\)"):
        config_of(None, {"policy": A_POLICY})
    with pytest.raises(TypeError, match=r"must be an OffloadConfig, got ResidentLayers\(.*OffloadConfig\(policy="):
        config_of(A_POLICY, {})


def test_a_configuration_in_place_of_the_model_or_the_strategy() -> None:
    with pytest.raises(TypeError, match=r"got OffloadConfig\. .* manage_activations\(model, config\)"):
        manage_activations(NOT_A_MODULE)
    with pytest.raises(TypeError, match=r"got an OffloadConfig as strategy: pass it as config="):
        enable_activation_offloading(Net(), NOT_A_MODULE)


def test_a_list_among_the_layers() -> None:
    model = Net()
    message = r"layers\[0\] is layers, a ModuleList, which is never called: .* layers=list\(model\.layers\)"
    with pytest.raises(ValueError, match=message):
        enable_activation_offloading(model, layers=[model.layers], config=CONFIG)


def test_use_after_the_end() -> None:
    model = Net()
    activations = manage_activations(model, CONFIG)
    activations.close()
    with pytest.raises(OffloadError, match=r"ended by close\(\) or remove\(\): call manage_activations\(\) again"):
        activations.__enter__()
    handle = enable_activation_offloading(model, config=CONFIG)
    handle.remove()
    with pytest.raises(OffloadError, match=r"call enable_activation_offloading\(\) again"):
        handle.forward()
    offload = CheckpointOffload(CONFIG)
    offload.close()
    with offload, pytest.raises(OffloadError, match=r"call CheckpointOffload\(\) again"):
        offload.checkpoint(model, data())
    with torch.no_grad():
        offload.checkpoint(model, data())
    offload.close()


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))
        self.decoder = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))


@pytest.mark.parametrize(
    "choose",
    [
        lambda model: list(model.encoder),
        lambda model: list(model.encoder[0]),
        lambda model: list(model.decoder),
    ],
    ids=["the same layers", "modules in a layer", "other layers"],
)
def test_a_second_call_is_refused(choose: Callable[[Coder], list[nn.Module]]) -> None:
    model = Coder()
    handle = enable_activation_offloading(model, layers=list(model.encoder), config=CONFIG)
    with pytest.raises(OffloadError, match=r"this Coder is already offloaded: call remove\(\) .* layers=\[\.\.\.\]"):
        enable_activation_offloading(model, layers=choose(model), config=CONFIG)
    handle.remove()
    enable_activation_offloading(model, layers=choose(model), config=CONFIG).remove()


def test_a_part_that_is_offloaded_is_named() -> None:
    model: Any = nn.ModuleDict({"first": Coder(), "second": Coder()})
    handle = enable_activation_offloading(model["second"], layers=list(model["second"].decoder), config=CONFIG)
    with pytest.raises(OffloadError, match=r"this ModuleDict is already offloaded, in second: call remove"):
        enable_activation_offloading(model, layers=list(model["first"].decoder), config=CONFIG)
    handle.remove()
