"""Tensors of TransformerEngine that hold quantized data and its scales instead of bytes of their own.

What its modules quantize for themselves they take apart before they save it: the pack hook sees plain tensors, which
move like any other. Only what passes between modules (the output of a layer in FP8, the query, key and value of
attention in FP8) is saved whole, as a `QuantizedTensor`. `PackedParts` takes it apart by its own protocol, which every
version has, `prepare_for_saving` and `restore_from_saved`.

Weights in FP8 and the cached copies that modules quantize from weights are saved whole as well, and stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from offload_engine._saved.handles import StayingTensor

# Nearly all that is saved is of these, which need not be asked.
PLAIN_TYPES: Final = (torch.Tensor, torch.nn.Parameter)


def is_quantized_activation(tensor: torch.Tensor) -> bool:
    """Whether a saved tensor is to be taken apart.

    Inside the function that saves it nothing but its shape tells an activation from the cached copy of a weight: that
    one is a matrix. (It may have a graph: where a module makes the copy, it is an output of the function that saves
    it.) So a quantized matrix stays, as what is in doubt must.
    """
    return (
        not isinstance(tensor, torch.nn.Parameter)
        and hasattr(tensor, "prepare_for_saving")
        and hasattr(tensor, "restore_from_saved")
        and not hasattr(tensor, "_TE_do_not_offload")
        and tensor.dim() > 2
    )


class PackedParts(StayingTensor):
    """Stands for one saved tensor that is made of others: the object stays, what it is made of is packed.

    Args:
        tensor: for which `is_quantized_activation` holds; it keeps its data.
        pack: what autograd keeps for one part.
        unpack: its inverse.
    """

    __slots__ = ("_parts", "_unpack")

    def __init__(
        self, tensor: torch.Tensor, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
    ) -> None:
        whole: Any = tensor.detach()  # another object over the same data: this one is emptied
        parts, shell = whole.prepare_for_saving()
        super().__init__(shell)
        self._parts = [None if part is None else pack(part) for part in parts]
        self._unpack = unpack

    def unpack(self) -> torch.Tensor:
        """A tensor of the same class, with the same data; its parts are checked for modification in place.

        Raises:
            RuntimeError: if one was modified in place after it was saved.
        """
        shell: Any = self._tensor
        shell.restore_from_saved([None if part is None else self._unpack(part) for part in self._parts])
        return shell
