# SPDX-License-Identifier: Apache-2.0
"""Recomputation switched on and off on a model that was built without.

What megatron-core reads from the configuration when it constructs a module is kept in an attribute of that module
(`_CACHED`); the rest it reads in each forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
"""Every layer, one by one."""


def _always(module: Any) -> bool:
    return True


# Name in recompute_modules -> attribute of a module -> whether it is set there.
_CACHED: Mapping[str, Mapping[str, Callable[[Any], bool]]] = {
    "core_attn": {"checkpoint_core_attention": _always},
    "moe_act": {"activation_recompute": _always},
    "layernorm": {
        "recompute_input_layernorm": lambda layer: not isinstance(layer.input_layernorm, IdentityOp),
        "recompute_pre_mlp_layernorm": lambda layer: not isinstance(layer.pre_mlp_layernorm, IdentityOp),
    },
    "mlp": {"recompute_mlp": lambda layer: not layer.is_moe_layer},
    "moe": {"moe_layer_recompute": _always},
    "shared_experts": {"shared_experts_recompute": _always},
}


def selective(modules: Sequence[str]) -> dict[str, Any]:
    """Return the fields of the configuration with which these modules are recomputed; of none, no fields."""
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)} if modules else {}


class Recomputation:
    """Switches chunks of a model built without recomputation; `fields` are of the configuration, while it is on."""

    def __init__(self, chunks: Sequence[torch.nn.Module], fields: Mapping[str, Any]) -> None:
        submodules: list[Any] = [module for chunk in chunks for module in chunk.modules()]
        configs = {id(m.config): m.config for m in submodules if hasattr(m, "config")}.values()
        self._on = [(config, name, value) for config in configs for name, value in fields.items()]
        for module_name in fields.get("recompute_modules", ()):
            flags = _CACHED[module_name].items()
            found = [(m, name, True) for m in submodules for name, is_set in flags if name in vars(m) and is_set(m)]
            if not found:
                raise ValueError(f"this model has no {module_name!r} to recompute")
            self._on += found
        self._off = [(owner, name, getattr(owner, name)) for owner, name, _ in self._on]

    def switch(self, is_on: bool) -> None:
        """Turn recomputation on or off. Idempotent."""
        for owner, name, value in self._on if is_on else self._off:
            setattr(owner, name, value)
