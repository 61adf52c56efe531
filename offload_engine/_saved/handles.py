# SPDX-License-Identifier: Apache-2.0
"""The handles that autograd keeps instead of saved tensors."""

from __future__ import annotations

from typing import Any, Final

import torch

from offload_engine._compat import torch_private
from offload_engine._compat.tensor_reads import Reads
from offload_engine._devices.regions import TensorSpec as Place
from offload_engine._saved.retirement import RetireQueue
from offload_engine._saved.storage import SavedStorage

_neg_view: Final[Any] = torch_private.neg_view


class PackedTensor:
    """Stands for one saved tensor inside autograd: a view of a `SavedStorage`, with everything to rebuild it exactly.

    Owned by autograd. The bytes of a storage are released with its last handle, that is, with the graph: so retained
    graphs, unused branches and abandoned graphs need no special handling.
    """

    __slots__ = ("storage", "place", "_handles", "_retired", "is_lazy", "_is_conj", "_is_neg", "has_storage_spec")

    def __init__(
        self, tensor: torch.Tensor, found: Reads, storage: SavedStorage, retired: RetireQueue, is_first: bool
    ) -> None:
        self._retired = retired
        self.place: Place = found[5]
        self.is_lazy: bool = found[7]
        self._is_conj = self.is_lazy and tensor.is_conj()
        self._is_neg = self.is_lazy and tensor.is_neg()
        self.has_storage_spec: bool = is_first and not self.is_lazy and found[6]
        if self.has_storage_spec:
            storage.spec = self.place
        self.storage: SavedStorage = storage
        self._handles = storage.handles  # see `SavedStorage.has_lost_handles`
        storage.handles[id(self)] = self.place
        if not is_first:
            storage.watch(tensor, id(self))

    def view(self, storage: torch.UntypedStorage, empty: torch.Tensor) -> torch.Tensor:
        """Return the saved tensor over `storage`: same shape, stride, offset and dtype, but as if it were not lazy.

        Args:
            storage: holds the bytes.
            empty: any tensor of the saved dtype on the device. The result is made from an alias of it, in half the time
                of a new tensor.
        """
        tensor = empty.data  # unlike detach(), with a version counter of its own
        offset, shape, stride, _ = self.place
        tensor.set_(storage, offset, shape, stride)
        return tensor

    def lazily(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a result of `view` in the form that was saved: conjugated, negated, or both."""
        if self._is_conj:
            tensor = tensor.conj()
        return _neg_view(tensor) if self._is_neg else tensor

    def __del__(self) -> None:
        try:
            storage = self.storage
        except AttributeError:  # the constructor failed
            return
        try:
            storage.forget_handle(id(self))
            if not storage.handles:
                self._retired.retire(storage)
        except BaseException as error:
            self._retired.defer_interrupt(error)


class StayingTensor:
    """Stands for one saved tensor that stays on the device.

    Checks for modification in place at unpack, because autograd omits its own check for tensors packed by hooks.
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._version = tensor._version

    def unpack(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: as autograd itself, if it was modified in place after it was saved.
        """
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"a tensor saved for backward, {self._tensor.dtype} of shape {tuple(self._tensor.shape)}, has been "
                "modified by an inplace operation since; clone it before the modification"
            )
        return self._tensor


def without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return what autograd keeps for a tensor that stays on the device: a detached alias.

    A node that saves its own output forms a reference cycle with it, which would keep both and their bytes alive if no
    backward runs: after an exception, or in an unused branch. Autograd attaches the graph again to the unpacked tensor,
    so an alias is enough. Leaves have no node, and TransformerEngine needs the marked tensor objects themselves.
    """
    return tensor if tensor.is_leaf or hasattr(tensor, "_TE_do_not_offload") else tensor.detach()
