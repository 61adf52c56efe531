# SPDX-License-Identifier: Apache-2.0
"""Checkpoints layers inside FSDP's wrapper, in place of the model's own checkpointing."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from offload_engine.frontends._layers.caches import DroppedCaches, LayerCaches
from offload_engine.frontends._layers.find_layers import Layer
from offload_engine.frontends._layers.layer_host import LayerHost

logger = logging.getLogger(__name__)


class CheckpointedLayer:
    """Makes one layer recompute in backward, while switched on, so that its group holds only its input.

    The checkpoint is around the forward of a layer, inside the hooks and wrappers of FSDP. So recomputation runs
    between the all-gather that the backward of the layer needs anyway and the reshard after it. A reentrant checkpoint
    around FSDP1 would gather the parameters once more.

    Args:
        layer: a layer without any other checkpoint.
        groups: groups of the model; the layer is checkpointed while its group is open.
        dropped: decides about caches of keys and values; None: a forward that receives one is not checkpointed.
    """

    def __init__(self, layer: Layer, groups: LayerHost, dropped: DroppedCaches | None = None) -> None:
        self.layer: Layer = layer
        self._groups = groups
        self._dropped = dropped
        self._is_on = False
        self._original: Any = None  # the instance attribute; mostly None, as `forward` is a method of the class
        self._handle: RemovableHandle | None = None

    def switch(self, on: bool) -> None:
        """Switch checkpointing of later forwards on or off; existing graphs do not change. Idempotent."""
        if on != self._is_on:
            (self._switch_on if on else self._switch_off)()

    def _switch_on(self) -> None:
        inner = self.layer.inner
        self._original = inner.__dict__.get("forward")
        self._is_on = True
        forward = _CheckpointedForward(inner.forward, self.layer, self._groups, self._dropped)
        inner.__dict__["forward"] = forward
        self._handle = self._groups.add_hook(self.layer.module, forward.look)
        self._groups.note_checkpointed(self.layer.module, True)

    def _switch_off(self) -> None:
        inner = self.layer.inner
        if self._handle is not None:
            self._handle.remove()
        inner.__dict__.pop("forward", None)  # may exist after an interrupt
        if self._original is not None:
            inner.__dict__["forward"] = self._original
        self._groups.note_checkpointed(self.layer.module, False)
        self._original, self._handle, self._is_on = None, None, False


class LayerCheckpoints:
    """Checkpoints each layer, in place of the model's own checkpointing; see `CheckpointedLayer`.

    Args:
        model: its own checkpointing is switched off until `remove`.
        layers: the layers to checkpoint; a layer wrapped by `apply_activation_checkpointing` is not changed.
        groups: groups of those layers.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer], groups: LayerHost) -> None:
        # Instance attributes only: FSDP1's wrapper forwards every attribute of the wrapped module.
        self._switched_off = [m for m in model.modules() if m.__dict__.get("gradient_checkpointing") is True]
        dropped = DroppedCaches()
        self._layers = [CheckpointedLayer(layer, groups, dropped) for layer in layers if not is_checkpointed(layer)]
        for module in self._switched_off:
            module.gradient_checkpointing = False  # type: ignore[assignment]
        for layer in self._layers:
            layer.switch(on=True)
        self._log(type(model).__name__, len(layers))

    def remove(self) -> None:
        """Restore the forward of each layer and the model's own checkpointing. Idempotent."""
        for layer in self._layers:
            layer.switch(on=False)
        for module in self._switched_off:
            module.gradient_checkpointing = True  # type: ignore[assignment]
        self._switched_off = []

    def _log(self, model: str, num_layers: int) -> None:
        logger.info(
            "%s: %d of %d layers are checkpointed without reentrance, inside FSDP's wrapper, with offloaded inputs",
            model,
            len(self._layers),
            num_layers,
        )
        if self._switched_off:
            logger.warning(
                "%s: its own gradient checkpointing is switched off in %d modules, because enable_ckpt=True "
                "checkpoints its layers; handle.remove() switches it on again",
                model,
                len(self._switched_off),
            )
        if len(self._layers) < num_layers:
            logger.warning(
                "%s: %d layers are wrapped in CheckpointWrapper and stay checkpointed by that",
                model,
                num_layers - len(self._layers),
            )


class _CheckpointedForward:
    """Replaces the forward of a layer; in a copy of the layer it calls the original forward."""

    def __init__(
        self, forward: Callable[..., Any], layer: Layer, groups: LayerHost, dropped: DroppedCaches | None
    ) -> None:
        functools.update_wrapper(self, forward)
        self._forward = forward
        self._layer = layer.module
        self._name = layer.name
        self._groups: LayerHost | None = groups
        self._dropped = dropped
        self._caches = LayerCaches(layer.inner)
        self._was_open = False  # at the last call of `look`
        self._has_cache = False  # at the last call of `look`

    def look(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note, before the forward, whether the group of the layer is open, because compiled code cannot test that.

        Raises:
            OffloadError: if the layer receives a cache of keys and values that cannot be dropped.
        """
        self._was_open = self._is_open()
        self._has_cache = self._was_open and self._caches.are_given(args, kwargs)
        if self._has_cache and self._dropped is not None:
            self._dropped.check(self._name, self._caches, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_open = self._was_open if torch.compiler.is_compiling() else self._is_open()
        if not is_open or (self._has_cache and self._dropped is None):
            return self._forward(*args, **kwargs)
        if self._has_cache:
            args, kwargs = self._caches.without(args, kwargs)
        names, num_args = tuple(kwargs), len(args)

        def run(*values: Any) -> Any:
            return self._forward(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))

        # All by position: a checkpoint keeps keyword arguments itself, bypassing saved tensors hooks.
        return checkpoint(run, *args, *kwargs.values(), use_reentrant=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_groups": None, "_was_open": False, "_has_cache": False}

    def _is_open(self) -> bool:
        """Return False in a copy, in evaluation and in recomputation."""
        return self._groups is not None and self._groups.open_layer is self._layer


def is_checkpointed(layer: Layer) -> bool:
    """Return whether PyTorch's `CheckpointWrapper` is around the layer, or directly inside FSDP's wrapper."""
    attribute = "_checkpoint_wrapped_module"
    return attribute in layer.name.split(".") or hasattr(layer.module, attribute) or hasattr(layer.inner, attribute)
