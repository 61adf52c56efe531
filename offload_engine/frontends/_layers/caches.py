# SPDX-License-Identifier: Apache-2.0
"""`LayerCaches`: finds caches of keys and values among the arguments of a layer."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn

from offload_engine.errors import OffloadError

logger = logging.getLogger(__name__)

_NAMES: Final = ("past_key_values", "past_key_value", "layer_past", "cache_params")  # in Hugging Face's models
_PARTS: Final = ("self_attention_cache", "cross_attention_cache")  # of a cache of an encoder and a decoder

_DROPPED = (
    "the layers receive an empty cache of keys and values, first %s. It is not filled, because enable_ckpt=True "
    "computes each layer twice; use_cache=False avoids making it"
)
_REFUSED = (
    "{} receives a cache of keys and values as {} ({}) that is not empty or has a fixed size. enable_ckpt=True "
    "computes the layer twice, and would append to it twice: use enable_ckpt=False, or pass no cache."
)


class LayerCaches:
    """Finds the caches that are passed to one layer, by position or by name: a second run would append to them again.

    An argument is a cache if it has the name of one, or the methods of one (`get_seq_length` and `update`).

    Args:
        layer: its forward names the arguments.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._names = _names_by_position(layer.forward)
        self._index = _index_in_caches(layer)

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Iterate over the names and values of the caches; the name is empty if there is none."""
        for name, value in (*self._named(args), *kwargs.items()):
            if _is_cache(name, value):
                yield name, value

    def are_given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether any cache is passed to the layer."""
        return any(True for _ in self.find(args, kwargs))

    def without(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with None in place of each cache, and without `use_cache`."""
        left = tuple([_replaced(name, value) for name, value in self._named(args)])
        return left, {name: _replaced(name, value) for name, value in kwargs.items()}

    def is_empty(self, cache: Any) -> bool:
        """Return whether the layer computes the same without this cache, which has no data of this layer yet.

        A cache of a fixed size is not empty: masks are made for all of it.
        """
        parts = [getattr(cache, name) for name in _PARTS if hasattr(cache, name)]
        if parts:
            return all(map(self.is_empty, parts))
        if not _has_methods(cache):
            return False
        entries = getattr(cache, "layers", None)
        if not isinstance(entries, list):
            return not cache.get_seq_length()
        # It may have data of earlier layers that are not checkpointed.
        own = entries if self._index is None else entries[self._index : self._index + 1]
        return not any(hasattr(entry, "max_cache_len") or _holds_tensors(entry.__dict__) for entry in own)

    def _named(self, args: tuple[Any, ...]) -> list[tuple[str, Any]]:
        return list(zip((*self._names, *("",) * len(args)), args, strict=False))


class DroppedCaches:
    """Decides about the caches passed to the checkpointed layers of one model: empty ones may be dropped."""

    def __init__(self) -> None:
        self._has_logged = False

    def check(self, layer: str, caches: LayerCaches, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse caches that are not empty; log, once, that empty ones are dropped.

        Raises:
            OffloadError: if a cache is not empty; names the layer and the argument.
        """
        for name, cache in caches.find(args, kwargs):
            if not caches.is_empty(cache):
                raise OffloadError(_REFUSED.format(layer, name or "an argument", type(cache).__name__))
            if not self._has_logged:
                self._has_logged = True
                logger.info(_DROPPED, layer)


def _names_by_position(forward: Callable[..., Any]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):  # no signature, as of a function written in C
        return ()
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in parameters if parameter.kind in by_position)


def _index_in_caches(layer: nn.Module) -> int | None:
    """Return the index under which a Hugging Face layer finds its part of a cache; None if it has none."""
    numbers = (module.__dict__.get("layer_idx") for module in layer.modules())
    return next((number for number in numbers if isinstance(number, int)), None)


def _is_cache(name: str, value: Any) -> bool:
    return value is not None and (name in _NAMES or _has_methods(value))


def _has_methods(value: Any) -> bool:
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def _replaced(name: str, value: Any) -> Any:
    if name == "use_cache":
        return False
    return None if _is_cache(name, value) else value


def _holds_tensors(attributes: dict[Any, Any]) -> bool:
    for value in attributes.values():
        if isinstance(value, dict) and _holds_tensors(value):
            return True
        if isinstance(value, torch.Tensor) and value.numel():
            return True
    return False
