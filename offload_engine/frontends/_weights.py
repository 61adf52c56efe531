"""Which saved tensors are weights: they never move, because somebody else holds them through the whole step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def may_move(tensor: torch.Tensor) -> bool:
    """False for a leaf that receives a gradient, for a parameter, for a view of either, and for a cast copy.

    A cast copy is what autocast makes of a weight, and holds until the region of autocast ends. One of a weight
    without a gradient is made anew for each use, so it may move like an activation.
    """
    base = tensor._base if tensor._is_view() else tensor
    assert base is not None
    if base.is_leaf:
        return not base.requires_grad and not isinstance(base, nn.Parameter)
    node: Any = base.grad_fn
    return not (_is_node(node, "ToCopyBackward0") and _is_node(node.next_functions[0][0], "AccumulateGrad"))


def with_storage(weights: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    """`weights`, and for wrappers without a storage of their own (DTensor and the like) the tensors inside them."""
    for weight in weights:
        if hasattr(weight, "__tensor_flatten__"):
            names, _ = weight.__tensor_flatten__()
            yield from with_storage(getattr(weight, name) for name in names)
        elif weight.layout is torch.strided:
            yield weight


def _is_node(node: Any, name: str) -> bool:
    return node is not None and type(node).__name__ == name
