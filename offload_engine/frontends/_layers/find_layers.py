# SPDX-License-Identifier: Apache-2.0
"""Finds the layers of a model, the module that runs them, and how the model is distributed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

logger = logging.getLogger(__name__)

NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)
CONTAINERS = (*NEVER_CALLED, nn.Sequential)
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
        ValueError: if it is not; names the strategies, or that of the model.
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
        model: already distributed.
        layers: given by the user; None: the first that exist of: units of FSDP that are elements of a module list;
            units of FSDP below the model that contain modules (a lone embedding or head does not); elements of the
            module list with the most parameters, see `_may_be_layers`. A warning says if these have less than half of
            the model's parameters, without embeddings.

    Raises:
        ValueError: if no layers are found, or a given module is not inside `model`, given twice, or never called.
    """
    if layers is not None:
        return _given_layers(model, layers)
    units = list(_outermost_units(model))
    found = [layer for layer, parent in units if isinstance(parent, CONTAINERS)]
    found = found or [layer for layer, _ in units if any(layer.inner.children())] or _largest_list(model)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has neither layers wrapped by FSDP nor a ModuleList of layers: "
            "pass its layers with layers=[...]"
        )
    return found


def body_of(model: nn.Module, layers: Sequence[Layer]) -> nn.Module:
    """Return the smallest module that runs all layers, which is called even if the caller bypasses the model."""
    path: list[str] = []
    for parts in zip(*(layer.name.split(".")[:-1] for layer in layers), strict=False):
        if len(set(parts)) > 1:
            break
        path.append(parts[0])
    while path and isinstance(model.get_submodule(".".join(path)), NEVER_CALLED):
        path.pop()
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
        if isinstance(module, NEVER_CALLED):
            raise ValueError(
                f"layers[{position}] is {found[-1].name}, a {type(module).__name__}, which is never called: pass the "
                "modules in it, as layers=list(model.layers) does"
            )
    if not found:
        raise ValueError("layers=[] names no layer: omit it, and the layers are found")
    return found


def _outermost_units(module: nn.Module, prefix: str = "") -> Iterator[tuple[Layer, nn.Module]]:
    """Yield the outermost FSDP units below `module`, each with its parent; of a unit with a list of units, the list."""
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
    """Return the elements of the ModuleList with the most parameters, among those that may hold the layers."""
    half = _num_elements(model) / 2
    sizes = {
        name: _num_elements(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and _may_be_layers(module, half)
    }
    largest = max(sizes, key=sizes.__getitem__, default="")  # of lists with the same parameters the outermost one
    if not sizes.get(largest):
        return []
    prefix = f"{largest}." if largest else ""
    # `named_children` yields each module once, even if it runs several times.
    layers = [Layer(prefix + name, child) for name, child in model.get_submodule(largest).named_children()]
    if sizes[largest] < half:
        _warn_of_little(model, layers, sizes[largest] / (2 * half))
    return layers


def _may_be_layers(modules: nn.ModuleList, half: float) -> bool:
    """Return whether a list may hold a model's layers: modules of one class, or of a few with most of the parameters.

    With a few classes, one must recur, as when attention and experts alternate. The stem, the trunk and the head of a
    model may be in a list, too, but then the layers are in the trunk.
    """
    if any(isinstance(module, NEVER_CALLED) for module in modules):
        return False
    classes = {type(module) for module in modules}
    return len(classes) == 1 or (len(classes) < len(modules) and _num_elements(modules) > half)


def _warn_of_little(model: nn.Module, layers: Sequence[Layer], share: float) -> None:
    logger.warning(
        "the layers that were found, %s to %s, have %.0f%% of the parameters of this %s, without embeddings: tensors "
        "that the rest of it saves stay on the device. If these are not its layers, pass them with layers=[...].",
        layers[0].name,
        layers[-1].name,
        100 * share,
        type(model).__name__,
    )


def _num_elements(module: nn.Module) -> int:
    """Return the number of elements of the parameters, without embeddings, which are large but save next to nothing.

    A head that is tied to an embedding does not count either.
    """
    parameters = set(module.parameters())
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            parameters.difference_update(part.parameters(recurse=False))
    return sum(parameter.numel() for parameter in parameters)
