"""Checkpointing of layers inside the wrap of FSDP, in place of the checkpointing that a model brings along."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from offload_engine.frontends._layers.find_layers import Layer
from offload_engine.frontends._layers.layer_groups import LayerGroups

logger = logging.getLogger(__name__)

# Keyword arguments with which Hugging Face models pass a cache of keys and values; what a layer appends in forward it
# would append again in recomputation.
CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")


class LayerCheckpoints:
    """Each layer recomputes what it saved: its input is all that its group holds.

    The checkpoint lies around the forward of a layer, inside the hooks and wraps of FSDP. So recomputation runs between
    the all-gather that the backward of the layer does anyway and the reshard behind it. A reentrant checkpoint around
    FSDP1 would gather the parameters once more.

    Args:
        model: whose own checkpointing is switched off as long as this lasts.
        layers: to be checkpointed; one that `apply_activation_checkpointing` wrapped is left as it is.
        groups: of those layers; one is checkpointed where its group is open.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer], groups: LayerGroups) -> None:
        # Of the modules themselves: the wrapper of FSDP1 has every attribute of what it wraps.
        self._switched_off = [m for m in model.modules() if m.__dict__.get("gradient_checkpointing") is True]
        self._layers = [layer for layer in layers if not is_checkpointed(layer)]
        for module in self._switched_off:
            module.gradient_checkpointing = False  # type: ignore[assignment]
        # What the instances had of their own before; mostly nothing, `forward` is a method of their class.
        self._originals = [(layer.inner, layer.inner.__dict__.get("forward")) for layer in self._layers]
        for layer in self._layers:
            layer.inner.__dict__["forward"] = _CheckpointedForward(layer.inner.forward, layer.module, groups)
        groups.note_checkpointed(layer.module for layer in self._layers)
        self._log(type(model).__name__, len(layers))

    def remove(self) -> None:
        """Give the layers their own forward, and the model its own checkpointing, back. Idempotent."""
        for inner, original in self._originals:
            del inner.__dict__["forward"]
            if original is not None:
                inner.__dict__["forward"] = original
        for module in self._switched_off:
            module.gradient_checkpointing = True  # type: ignore[assignment]
        self._originals, self._switched_off = [], []

    def _log(self, model: str, num_layers: int) -> None:
        logger.info(
            "%s: %d of %d layers are checkpointed without reentrance, inside FSDP's wrap, and their inputs offloaded",
            model,
            len(self._layers),
            num_layers,
        )
        if self._switched_off:
            logger.warning(
                "%s: its own gradient checkpointing is switched off in %d modules, because its layers are checkpointed "
                "already; handle.remove() switches it on again",
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
    """Stands in for the forward of a layer, and in a copy of that layer for the forward of the copy."""

    def __init__(self, forward: Callable[..., Any], layer: nn.Module, groups: LayerGroups) -> None:
        functools.update_wrapper(self, forward)
        self._forward = forward
        self._layer = layer
        self._groups: LayerGroups | None = groups

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._groups is None or self._groups.open_layer is not self._layer:  # a copy, evaluation, recomputation
            return self._forward(*args, **kwargs)
        kwargs = _without_cache(kwargs)
        names, num_args = tuple(kwargs), len(args)

        def run(*values: Any) -> Any:
            return self._forward(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))

        # All by position: what is passed by keyword a checkpoint holds by itself, past the hooks of any offload.
        return checkpoint(run, *args, *kwargs.values(), use_reentrant=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_groups": None}


def is_checkpointed(layer: Layer) -> bool:
    """True if PyTorch's `CheckpointWrapper` lies around the layer, or directly inside the wrap of FSDP."""
    attribute = "_checkpoint_wrapped_module"
    return attribute in layer.name.split(".") or hasattr(layer.module, attribute) or hasattr(layer.inner, attribute)


def _without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {name: None for name in CACHES if kwargs.get(name) is not None}
    if kwargs.get("use_cache"):
        changed["use_cache"] = False
    return {**kwargs, **changed}
