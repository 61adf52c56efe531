# SPDX-License-Identifier: Apache-2.0
"""Finds the layers of a model, the module that runs them, and how the model is distributed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
STRATEGIES = {
    "fsdp": "wrapped in FullyShardedDataParallel",
    "fsdp2": "sharded with fully_shard",
    "ddp": "wrapped in DistributedDataParallel",
    "none": "not distributed",
}


class Layer(NamedTuple):
    """A layer, and its name in the model."""

    name: str
    module: nn.Module

    @property
    def inner(self) -> nn.Module:
        """Return the module whose forward runs with gathered parameters: the layer, or the module that FSDP1 wraps."""
        return self.module.module if _is_fsdp1(self.module) else self.module  # type: ignore[return-value]


def check_strategy(model: nn.Module, strategy: str) -> None:
    """Check that `strategy` exists and that `model` is distributed by it.

    Raises:
        ValueError: if not; names the strategies, or that of the model.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}; expected one of {', '.join(map(repr, STRATEGIES))}")
    found = strategy_of(model)
    if found != strategy:
        raise ValueError(
            f"strategy={strategy!r} is for a model {STRATEGIES[strategy]}, but this {type(model).__name__} is "
            f"{STRATEGIES[found]}: pass strategy={found!r}, or distribute the model first"
        )


def strategy_of(model: nn.Module) -> str:
    """Return how `model` is distributed. FSDP inside DDP counts as FSDP, which wraps the layers."""
    modules = list(model.modules())
    if any(map(_is_fsdp1, modules)):
        return "fsdp"
    if any(map(_is_fsdp2, modules)):
        return "fsdp2"
    return "ddp" if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in modules) else "none"


def find_layers(model: nn.Module, layers: Sequence[nn.Module] | None) -> list[Layer]:
    """Return the layers of `model`, in the order of its named modules.

    Args:
        model: distributed already.
        layers: given by the user; None: the first that exist of: units of FSDP that are elements of a module list;
            units of FSDP below the model that contain modules (a lone embedding or head does not); elements of the
            list of equal modules with the most parameters.

    Raises:
        ValueError: if no layers are found, or a given module is not inside `model` or given twice.
    """
    if layers is not None:
        return _given_layers(model, layers)
    units = list(_outermost_units(model))
    found = [layer for layer, parent in units if isinstance(parent, CONTAINERS)]
    found = found or [layer for layer, _ in units if any(layer.inner.children())] or _largest_list(model)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has neither layers wrapped by FSDP nor a ModuleList of equal modules: "
            "pass its layers with layers=[...]"
        )
    return found


def body_of(model: nn.Module, layers: Sequence[Layer]) -> nn.Module:
    """Return the smallest module that runs all layers: it is called even if the caller bypasses the model."""
    path: list[str] = []
    for parts in zip(*(layer.name.split(".")[:-1] for layer in layers), strict=False):
        if len(set(parts)) > 1:
            break
        path.append(parts[0])
    while path and isinstance(model.get_submodule(".".join(path)), nn.ModuleList | nn.ModuleDict):
        path.pop()  # a container is never called
    return model.get_submodule(".".join(path))


def units_inside(layer: Layer) -> list[nn.Module]:
    """Return the modules in and at `layer` whose parameters FSDP gathers before their forward."""
    units = [module for module in layer.module.modules() if _is_fsdp1(module) or _is_fsdp2(module)]
    return [unit.module if _is_fsdp1(unit) else unit for unit in units]  # type: ignore[misc]


def _is_fsdp2(module: nn.Module) -> bool:
    return _is_of_fsdp(module, "FSDPModule")


def _is_fsdp1(module: nn.Module) -> bool:
    return _is_of_fsdp(module, "FullyShardedDataParallel")


def _is_of_fsdp(module: nn.Module, class_name: str) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported by `import torch`
    return fsdp is not None and isinstance(module, getattr(fsdp, class_name))


def _given_layers(model: nn.Module, layers: Sequence[nn.Module]) -> list[Layer]:
    names = {module: name for name, module in model.named_modules() if name}
    found = []
    for position, module in enumerate(layers):
        if module not in names:
            raise ValueError(
                f"layers[{position}] is a {type(module).__name__} that is not a module inside this "
                f"{type(model).__name__}, or is given twice"
            )
        found.append(Layer(names.pop(module), module))
    if not found:
        raise ValueError("layers=[] names no layer: omit it to let the layers be found")
    return found


def _outermost_units(module: nn.Module, prefix: str = "") -> Iterator[tuple[Layer, nn.Module]]:
    """Yield the outermost FSDP units below `module`, each with its parent; for a unit with a list of units, these."""
    for name, child in module.named_children():
        layer = Layer(prefix + name, child)
        if not (_is_fsdp1(child) or _is_fsdp2(child)):
            yield from _outermost_units(child, f"{layer.name}.")
            continue
        inside = list(_outermost_units(child, f"{layer.name}."))
        if not isinstance(module, CONTAINERS) and any(isinstance(parent, CONTAINERS) for _, parent in inside):
            yield from inside
        else:
            yield layer, module


def _largest_list(model: nn.Module) -> list[Layer]:
    """Return the elements of the ModuleList with the most parameters, among those of modules of one class."""
    largest: list[Layer] = []
    largest_size = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1:
            size = _num_elements(module.parameters())
            if size > largest_size:
                # `named_children` yields each module once, even if it runs several times.
                largest, largest_size = [Layer(f"{name}.{i}", child) for i, child in module.named_children()], size
    return largest


def _num_elements(parameters: Iterable[torch.Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)
