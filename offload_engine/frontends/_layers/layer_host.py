# SPDX-License-Identifier: Apache-2.0
"""`LayerHost`: what forms the groups of layers, as seen by what checkpoints layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from offload_engine.frontends._layers.find_layers import Layer


class LayerHost(Protocol):
    """Forms the groups of layers, and puts hooks on them."""

    @property
    def open_layer(self) -> nn.Module | None:
        """Return the running layer if its saved tensors go into its group; None if an outer checkpoint runs it."""

    def note_checkpointed(self, layer: nn.Module, is_checkpointed: bool) -> None:
        """Declare whether the forward of a layer is checkpointed, so that its group holds only the inputs."""

    def add_hook(self, layer: nn.Module, function: Callable[..., None]) -> RemovableHandle:
        """Call `function` before the forward of `layer` and after the hook that opens its group, never compiled."""

    def add_hooks_inside(self, layer: Layer, before: Callable[..., None], after: Callable[..., None]) -> None:
        """Call `before` and `after` around the forward of a layer, inside FSDP's hooks, never compiled."""
