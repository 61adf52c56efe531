# SPDX-License-Identifier: Apache-2.0
"""Excludes tensors that layers read and never offload: weights that FSDP gathers, and inputs that all layers share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from offload_engine._saved.eligibility import with_storage
from offload_engine.engine import OffloadEngine


def exclude_weights(engine: OffloadEngine, unit: nn.Module) -> None:
    """Exclude the storages of a unit's parameters, after FSDP has gathered them: they stay on the device.

    FSDP resizes and fills these storages itself, so a storage held by the engine could change at any time, and a copy
    would gain nothing. Most are recognized as views of parameters when packed. But a custom Function may save a
    detached alias, and a gathered storage is not the sharded one that the session knows as a weight.
    """
    for weight in with_storage(unit.parameters()):
        engine.exclude(weight)


def exclude_shared_inputs(engine: OffloadEngine, *inputs: Any) -> None:
    """Exclude inputs without a gradient, such as masks and position embeddings, which all layers share.

    The last layer, which stays, needs them when backward begins: they would be copied in before their copy-out was
    complete.

    Args:
        engine: moves the saved tensors of the layers.
        inputs: tensors, in containers of any depth.
    """
    for tensor in _tensors_in(inputs):
        if not tensor.requires_grad:
            for inner in with_storage((tensor,)):
                engine.exclude(inner)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors_in(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for element in value:
            yield from _tensors_in(element)
