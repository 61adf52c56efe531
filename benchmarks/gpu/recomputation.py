# SPDX-License-Identifier: Apache-2.0
"""Recomputation switched on and off on a model that was built without.

What megatron-core reads from the configuration when it constructs a module is kept in an attribute of that module
(`_CACHED`); the rest it reads in each forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

FULL: Mapping[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
"""Every layer, one by one."""


def _always(module: Any) -> bool:
    return True


def _has_norm(name: str) -> Callable[[Any], bool]:
    def has_norm(layer: Any) -> bool:
        from megatron.core.transformer.identity_op import IdentityOp

        return not isinstance(getattr(layer, name), IdentityOp)

    return has_norm


# Name in recompute_modules -> attribute of a module -> whether it is set there.
_CACHED: Mapping[str, Mapping[str, Callable[[Any], bool]]] = {
    "core_attn": {"checkpoint_core_attention": _always},
    "moe_act": {"activation_recompute": _always},
    "layernorm": {
        "recompute_input_layernorm": _has_norm("input_layernorm"),
        "recompute_pre_mlp_layernorm": _has_norm("pre_mlp_layernorm"),
    },
    "mlp": {"recompute_mlp": lambda layer: not layer.is_moe_layer},
    "moe": {"moe_layer_recompute": _always},
    "shared_experts": {"shared_experts_recompute": _always},
}


def selective(modules: Sequence[str]) -> dict[str, Any]:
    """Return the fields of the configuration with which these modules are recomputed; of none, no fields."""
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)} if modules else {}


class Recomputation:
    """Switches one model.

    Args:
        chunks: of a model built without recomputation.
        fields: of the configuration, while it is on.

    Raises:
        ValueError: if one of `recompute_modules` is nowhere in the model.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], fields: Mapping[str, Any]) -> None:
        submodules: list[Any] = [module for chunk in chunks for module in chunk.modules()]
        configs = {id(m.config): m.config for m in submodules if hasattr(m, "config")}.values()
        self._changes: list[tuple[Any, dict[str, Any]]] = [(config, dict(fields)) for config in configs]
        for name in fields.get("recompute_modules", ()):
            found = [(m, own) for m in submodules if (own := _cached(m, name))]
            if not found:
                raise ValueError(f"this model has no {name!r} to recompute")
            self._changes += found
        self._before = [(owner, {name: getattr(owner, name) for name in own}) for owner, own in self._changes]

    def on(self) -> None:
        _set(self._changes)

    def off(self) -> None:
        """Turn recomputation off. Idempotent."""
        _set(self._before)


def _cached(module: Any, name: str) -> dict[str, Any]:
    flags = _CACHED[name].items()
    return {attribute: True for attribute, is_set in flags if attribute in vars(module) and is_set(module)}


def _set(changes: Sequence[tuple[Any, Mapping[str, Any]]]) -> None:
    for owner, fields in changes:
        for name, value in fields.items():
            setattr(owner, name, value)
