# SPDX-License-Identifier: Apache-2.0
"""Recognizes weights among saved tensors: they never move, because the model holds them through the whole step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import nn

from offload_engine._compat import torch_private

_LEAF: Final[Any] = torch_private.LEAF_NODE
_CAST: Final[Any] = torch_private.CAST_NODE
_CAST_OR_VIEW: Final[Any] = torch_private.VIEW_NODES | {_CAST}


def may_move(tensor: torch.Tensor) -> bool:
    """Return False for a leaf that receives a gradient, a parameter, a view of either, or a cast copy.

    Autocast makes a cast copy of a weight or of a view, and mostly caches it until its region ends. A weight without a
    gradient gets a new copy at each use, which may move like an activation.
    """
    base = tensor._base if tensor._is_view() else tensor
    assert base is not None
    if base.is_leaf:
        return not base.requires_grad and not isinstance(base, nn.Parameter)
    node: Any = base.grad_fn
    if type(node) is not _CAST:
        return True
    while type(node) in _CAST_OR_VIEW:
        node = node.next_functions[0][0]
    return type(node) is not _LEAF


def weights_of(parts: Iterable[nn.Module | torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of the modules among `parts`, and the tensors among them."""
    for part in parts:
        if isinstance(part, torch.Tensor):
            yield part
        else:
            for module in _modules_of(part):
                for tensor in (*module._parameters.values(), *module._buffers.values()):
                    if tensor is not None:
                        yield tensor


def _modules_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in one, each once; `modules()` takes twice as long, while the device may wait for the step."""
    found = {module}
    waiting = [module]
    while waiting:
        yield (module := waiting.pop())
        for child in module._modules.values():
            if child is not None and child not in found:
                found.add(child)
                waiting.append(child)
