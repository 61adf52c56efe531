# SPDX-License-Identifier: Apache-2.0
"""`MarkedLayers`: gives each call of a layer groups of its own, where groups are formed by size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offload_engine.frontends._common.groups import AutomaticGroups
from offload_engine.frontends._common.session import is_in_backward
from offload_engine.frontends._layers.exclusions import exclude_shared_inputs, exclude_weights
from offload_engine.frontends._layers.find_layers import Layer
from offload_engine.frontends._layers.group_hooks import GroupHooks
from offload_engine.traits import GroupTraits


class MarkedLayers:
    """Names the groups of layers, so that a budget can choose to checkpoint a layer; implements `LayerHost`.

    Outside of layers, and in a layer inside another one, groups are as without it.

    Args:
        body: the module that runs the layers. Its call begins a forward: the decision that comes with it may change the
            hooks of a layer, which is not possible while these run.
        layers: layers of the model, in order.
        groups: groups of all that is saved.
    """

    def __init__(self, body: nn.Module, layers: Sequence[Layer], groups: AutomaticGroups) -> None:
        self._groups = groups
        self._open: nn.Module | None = None
        self._checkpointed: set[nn.Module] = set()
        self._forward = self._num_layers = 0  # the running forward, and layers called in it
        self._hooks = GroupHooks()
        self._hooks.enclose_body(body, self._before_body, lambda *_: None)
        for layer in layers:
            self._hooks.enclose_layer(layer, partial(self._enter, name=layer.name), self._exit, self._keep_weights)

    @property
    def open_layer(self) -> nn.Module | None:
        """See `LayerHost`."""
        return self._open if self._is_saving() else None

    def note_checkpointed(self, layer: nn.Module, is_checkpointed: bool) -> None:
        """See `LayerHost`."""
        (self._checkpointed.add if is_checkpointed else self._checkpointed.discard)(layer)

    def add_hook(self, layer: nn.Module, function: Callable[..., None]) -> RemovableHandle:
        """See `LayerHost`."""
        return self._hooks.add(layer, function)

    def add_hooks_inside(self, layer: Layer, before: Callable[..., None], after: Callable[..., None]) -> None:
        """See `LayerHost`."""
        self._hooks.enclose_inner(layer, before, after)

    def begin(self) -> None:
        """Begin to save: exclude hooks from torch.compile, in case layers have been compiled, and close all layers."""
        self._hooks.untrace()
        self._open = None

    def remove(self) -> None:
        """Remove every hook. Idempotent."""
        self._hooks.remove()

    def _before_body(self, body: nn.Module, args: Any) -> None:
        if self._is_saving():
            self._groups.start_forward()

    def _enter(self, layer: nn.Module, args: Any, kwargs: Any, *, name: str) -> None:
        if self._open is not None or not self._is_saving():
            return
        number = self._groups.num_forwards + (self._groups.session.chunk is None)  # it begins with what is saved next
        if self._forward != number:
            self._forward, self._num_layers = number, 0
        traits = GroupTraits(layer=self._num_layers, read_once=layer in self._checkpointed)
        self._num_layers += 1
        self._open = layer
        self._groups.name_groups(name, traits)
        exclude_shared_inputs(self._groups.session.engine, args, kwargs)

    def _exit(self, layer: nn.Module, args: Any, output: Any) -> None:
        if self._open is layer and not is_in_backward():
            self._open = None
            self._groups.name_groups()

    def _keep_weights(self, unit: nn.Module, args: Any) -> None:
        if self._is_saving():
            exclude_weights(self._groups.session.engine, unit)

    def _is_saving(self) -> bool:
        return torch.is_grad_enabled() and not is_in_backward() and self._groups.are_innermost
