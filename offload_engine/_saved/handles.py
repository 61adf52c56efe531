"""The handles that autograd keeps instead of saved tensors."""

from __future__ import annotations

from typing import Any, Final

import torch

from offload_engine._compat import torch_private
from offload_engine._saved.retirement import RetireQueue
from offload_engine._saved.storage import SavedStorage

_neg_view: Final[Any] = torch_private.neg_view


class PackedTensor:
    """Stands for one saved tensor inside autograd: a view of a `SavedStorage`, with everything to rebuild it exactly.

    Autograd owns it. When the graph is freed the last handle of a storage goes, and with it the bytes: that is why a
    retained graph, an unused branch and an abandoned one all end well.
    """

    __slots__ = ("storage", "dtype", "_retired", "_shape", "_stride", "_offset", "_is_conj", "_is_neg", "gives_form")

    def __init__(self, tensor: torch.Tensor, storage: SavedStorage, retired: RetireQueue, is_first: bool) -> None:
        self._retired = retired
        self._shape = tensor.shape
        self._stride = tensor.stride()
        self._offset = tensor.storage_offset()
        self.dtype: torch.dtype = tensor.dtype
        self._is_conj = tensor.is_conj()
        self._is_neg = tensor.is_neg()
        # With an offset the storage would be larger than the tensor, or the tensor not contiguous.
        is_whole: bool = is_first and tensor.is_contiguous() and tensor.nbytes == storage.nbytes
        self.gives_form: bool = is_whole and not self._is_conj and not self._is_neg  # that of its storage
        if self.gives_form:
            storage.form = self._shape, self._stride, self.dtype
        self.storage: SavedStorage = storage
        storage.num_handles += 1

    def view(self, buffer: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
        """The saved tensor over the storage of `buffer`: same shape, stride, offset and dtype.

        Args:
            buffer: its storage holds the bytes.
            empty: any tensor of the saved dtype on the device; an alias of it becomes the result, because to make a
                tensor from nothing takes twice as long.
        """
        tensor = empty.data  # unlike detach(), with a version counter of its own
        tensor.set_(buffer.untyped_storage(), self._offset, self._shape, self._stride)
        if self._is_conj:
            tensor = tensor.conj()
        return _neg_view(tensor) if self._is_neg else tensor

    def __del__(self) -> None:
        try:
            storage = self.storage
        except AttributeError:  # its own making failed
            return
        storage.num_handles -= 1
        if storage.num_handles == 0:
            self._retired.retire(storage)


class StayingTensor:
    """Stands for one saved tensor that stays where it is.

    Autograd checks whether what it saved was modified in place since, but not where hooks have packed it: this does.
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._version = tensor._version

    def unpack(self) -> torch.Tensor:
        """The very tensor.

        Raises:
            RuntimeError: if it was modified in place after it was saved, as autograd itself would.
        """
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"a tensor saved for backward, {self._tensor.dtype} of shape {tuple(self._tensor.shape)}, has been "
                "modified by an inplace operation since; clone it before the modification"
            )
        return self._tensor


def without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """What autograd keeps for a tensor that stays where it is.

    An output comes together with the node that saves it. Each would keep the other, and their bytes, alive for ever
    where no backward runs: after an exception, or in a branch that nobody uses. Autograd attaches the graph again to
    whatever it gets back, so an alias does. A leaf has no node, and TransformerEngine wants back what it has marked.
    """
    return tensor if tensor.is_leaf or hasattr(tensor, "_TE_do_not_offload") else tensor.detach()
