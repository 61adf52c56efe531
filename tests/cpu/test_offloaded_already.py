# SPDX-License-Identifier: Apache-2.0
"""A model is offloaded once, whichever of its layers a second call names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from offload_engine import OffloadConfig, OffloadError, enable_activation_offloading

CONFIG = OffloadConfig(min_tensor_bytes=1, directory="none")


class Net(nn.Module):
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
def test_a_second_call_is_refused(choose: Callable[[Net], list[nn.Module]]) -> None:
    model = Net()
    handle = enable_activation_offloading(model, layers=list(model.encoder), config=CONFIG)
    with pytest.raises(OffloadError, match=r"this Net is offloaded already: call remove\(\) .* layers=\[\.\.\.\]"):
        enable_activation_offloading(model, layers=choose(model), config=CONFIG)
    handle.remove()
    enable_activation_offloading(model, layers=choose(model), config=CONFIG).remove()


def test_a_part_that_is_offloaded_is_named() -> None:
    model: Any = nn.ModuleDict({"first": Net(), "second": Net()})
    handle = enable_activation_offloading(model["second"], layers=list(model["second"].decoder), config=CONFIG)
    with pytest.raises(OffloadError, match=r"this ModuleDict is offloaded already, in second: call remove"):
        enable_activation_offloading(model, layers=list(model["first"].decoder), config=CONFIG)
    handle.remove()
