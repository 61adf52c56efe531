# SPDX-License-Identifier: Apache-2.0
"""Tensors of TransformerEngine that hold quantized data and its scales instead of bytes of their own.

Its modules take tensors that they quantize themselves apart before saving: the pack hook gets plain tensors, which move
like any other. Only tensors passed between modules (the output of a layer in FP8; query, key and value of attention in
FP8) are saved whole, as a `QuantizedTensor`. `PackedParts` takes them apart by their own protocol, which every version
has: `prepare_for_saving` and `restore_from_saved`.

FP8 weights, and the cached copies that modules quantize from weights, are saved whole too, and stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from offload_engine._saved.handles import StayingTensor

# Types that are never quantized: nearly all saved tensors, so they skip the test.
PLAIN_TYPES: Final = (torch.Tensor, torch.nn.Parameter)


def is_quantized_activation(tensor: torch.Tensor) -> bool:
    """Return whether a saved tensor is a quantized activation, to be taken apart.

    At the time of saving only the shape distinguishes an activation from the cached copy of a weight, which is a
    matrix. (The copy may have a graph too: if a module makes it, it is an output of the function that saves it.) So
    every quantized matrix stays, to be safe.
    """
    return (
        not isinstance(tensor, torch.nn.Parameter)
        and hasattr(tensor, "prepare_for_saving")
        and hasattr(tensor, "restore_from_saved")
        and not hasattr(tensor, "_TE_do_not_offload")
        and tensor.dim() > 2
    )


class PackedParts(StayingTensor):
    """Stands for one saved tensor made of others: the outer object stays, and its parts are packed.

    Args:
        tensor: one for which `is_quantized_activation` is true; it keeps its data.
        pack: returns what autograd keeps for one part.
        unpack: the inverse of `pack`.
    """

    __slots__ = ("_parts", "_unpack")

    def __init__(
        self, tensor: torch.Tensor, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
    ) -> None:
        whole: Any = tensor.detach()  # another object over the same data, because `prepare_for_saving` empties it
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
