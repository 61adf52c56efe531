# SPDX-License-Identifier: Apache-2.0
"""Tensors of TransformerEngine that hold quantized data and its scales instead of bytes of their own.

Its modules take tensors that they quantize themselves apart before saving: the pack hook gets plain tensors, which move
like any other. Only tensors passed between modules (the output of a layer in FP8; query, key and value of attention in
FP8) are saved whole, as a `QuantizedTensor`. `PackedParts` takes them apart by their own protocol, which every version
has: `prepare_for_saving` and `restore_from_saved`. That is done for classes that are known to hold one tensor, and to
share no more than its data with what `detach` returns. Any other class with this protocol is refused by name, and
stays: a `GroupedTensor` may be the weights of all experts.

FP8 weights, and the cached copies that modules quantize from weights, are saved whole too, and stay on the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Final

import torch

from offload_engine._saved.handles import StayingTensor

# Types that are never quantized: nearly all saved tensors, so they skip the test.
PLAIN_TYPES: Final = (torch.Tensor, torch.nn.Parameter)

KNOWN_CLASSES: Final = frozenset(
    {
        "Float8Tensor",  # one scale, current or delayed
        "Float8BlockwiseQTensor",
        "MXFP8Tensor",
        "NVFP4Tensor",
        "HybridQuantizedTensor",  # of two others, by rows and by columns
        "IdentityTensor",  # in full precision
    }
)


def taken_apart(
    tensor: torch.Tensor, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
) -> PackedParts | None:
    """Return what autograd keeps for a quantized activation; None for any other tensor, which is packed whole.

    At the time of saving only the shape distinguishes an activation from the cached copy of a weight, which is a
    matrix. (The copy may have a graph too: if a module makes it, it is an output of the function that saves it.) So
    every quantized matrix stays, to be safe.

    Args:
        tensor: as autograd saves it.
        pack: returns what autograd keeps for one part.
        unpack: the inverse of `pack`.
    """
    if (
        tensor.dim() <= 2
        or isinstance(tensor, torch.nn.Parameter)
        or not (hasattr(tensor, "prepare_for_saving") and hasattr(tensor, "restore_from_saved"))
        or hasattr(tensor, "_TE_do_not_offload")
    ):
        return None
    if (own := _detached(tensor)) is not None:
        return PackedParts(own, pack, unpack)
    name = type(tensor).__name__
    warnings.warn(f"saved tensors of class {name} stay on the device: what they hold is not known", stacklevel=2)
    return None


def _detached(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return another object over the same data, to be emptied; None if the class is not known or there is none."""
    if KNOWN_CLASSES.isdisjoint([kind.__name__ for kind in type(tensor).__mro__]):
        return None
    try:
        return tensor.detach()
    except NotImplementedError:  # one of two that are no tensors themselves
        return None


class PackedParts(StayingTensor):
    """Stands for one saved tensor made of others: the outer object stays, and its parts are packed.

    Args:
        tensor: of a known class; it loses its data.
        pack: returns what autograd keeps for one part.
        unpack: the inverse of `pack`.
    """

    __slots__ = ("_parts", "_unpack")

    def __init__(
        self, tensor: torch.Tensor, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
    ) -> None:
        whole: Any = tensor
        parts, shell = whole.prepare_for_saving()
        super().__init__(shell)
        self._parts = [None if part is None else pack(part) for part in parts]
        self._unpack = unpack

    def unpack(self) -> torch.Tensor:
        """Return a tensor of the same class with the same data.

        Raises:
            RuntimeError: if a part was modified in place after it was saved.
        """
        shell: Any = self._tensor
        shell.restore_from_saved([None if part is None else self._unpack(part) for part in self._parts])
        return shell
