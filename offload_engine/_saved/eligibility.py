# SPDX-License-Identifier: Apache-2.0
"""`Eligibility`: decides which saved tensors may move."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload_engine._compat import reads
from offload_engine._compat.tensor_reads import Reads
from offload_engine._observe.reasons import Reason, reason_to_stay
from offload_engine._saved.handles import without_graph

_TENSOR: Final = torch.Tensor  # constants, because each saved tensor is compared with them
_STRIDED: Final = torch.strided
_read_plain: Final[Any] = reads.read_plain
_MIN_PRUNED: Final = 1024  # number of excluded storages from which on expired ones are removed

Lasting = dict[int, StorageWeakRef]
"""Excluded storages, by their address as objects."""


class Eligibility:
    """Decides for each storage whether it may move or stays on the device.

    Args:
        torch_device: only tensors on this device move.
        min_tensor_bytes: smaller storages stay.
        lasting: storages that are excluded for good, owned by the caller, which keeps them over resets. None: none yet.
    """

    def __init__(
        self,
        torch_device: torch.device,
        min_tensor_bytes: int,
        lasting: Lasting | None = None,
    ) -> None:
        self._torch_device = torch_device
        self._min_storage_bytes = max(1, min_tensor_bytes)  # empty storages never move
        self._weights: frozenset[int] = frozenset()
        self._lasting: Lasting = {} if lasting is None else lasting
        self._excluded: Lasting = dict(self._lasting)
        self._prune_at: int = _MIN_PRUNED

    def begin(self, weights: Iterable[torch.Tensor] = ()) -> None:
        """Start an iteration; the storages of `weights` are not activations."""
        self._weights = frozenset()
        self.add_weights(weights)
        self.clear()

    def add_weights(self, weights: Iterable[torch.Tensor]) -> None:
        """Note that the storages of more `weights` are not activations, in this iteration."""
        self._weights |= frozenset(weight.untyped_storage().data_ptr() for weight in with_storage(weights))

    def clear(self) -> None:
        """Forget the storages that were excluded for the iteration, at its end."""
        for key in [key for key, weak in self._lasting.items() if weak.expired()]:
            del self._lasting[key]
        self._excluded = dict(self._lasting)

    def exclude(self, tensor: torch.Tensor, for_good: bool = False) -> None:
        """Exclude the storage of `tensor` from moves in this iteration.

        Args:
            tensor: any view of the storage; with `for_good`, also a wrapper made of other tensors.
            for_good: exclude it in all iterations, by the identity of the storage, also while it has no bytes.
        """
        if for_good:
            self._exclude_for_good(tensor)
            return
        storage = tensor.untyped_storage()
        # The weak reference keeps the address from being reused, without keeping the bytes alive.
        self._excluded[storage._cdata] = StorageWeakRef(storage)
        # Prune, because an iteration may never end, as when each step runs its forward before the previous backward.
        if len(self._excluded) >= self._prune_at:
            self._excluded = {key: weak for key, weak in self._excluded.items() if not weak.expired()}
            self._prune_at = max(_MIN_PRUNED, 2 * len(self._excluded))

    def _exclude_for_good(self, tensor: torch.Tensor) -> None:
        for part in with_storage((tensor,)):
            storage = part.untyped_storage()
            if storage._cdata not in self._lasting:
                self._lasting[storage._cdata] = self._excluded[storage._cdata] = StorageWeakRef(storage)

    def read_movable(self, tensor: torch.Tensor) -> Reads | None:
        """Return the facts that the engine needs of `tensor` if the bytes of its storage may move, else None."""
        # A view of a parameter is not plain, whatever its storage: FSDP gathers weights into new ones.
        found: Reads | None = _read_plain(tensor, self._torch_device, self._min_storage_bytes)
        if (
            found is None
            or hasattr(tensor, "_TE_do_not_offload")
            or (self._excluded and found[1] in self._excluded)
            or found[3] in self._weights
        ):
            return None
        return found

    def reason_to_stay(self, tensor: torch.Tensor) -> Reason | None:
        """Return why `read_movable` returns None for a tensor. Slow; for recordings."""
        return reason_to_stay(tensor, self._torch_device, self._min_storage_bytes, self._weights, self._excluded)

    def staying(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what autograd keeps for a tensor that stays: a view of a weight as is, any other tensor detached."""
        if tensor.is_leaf:  # most are: parameters, and tensors that a function computed only for its backward
            return tensor
        if type(tensor) is _TENSOR and tensor.layout is _STRIDED and not tensor._is_zerotensor():
            if tensor.untyped_storage().data_ptr() in self._weights:
                return tensor
        return without_graph(tensor)


def with_storage(weights: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    """Yield `weights`; for wrappers without a storage of their own (DTensor and the like) the tensors inside them."""
    for weight in weights:
        if hasattr(weight, "__tensor_flatten__"):
            names, _ = weight.__tensor_flatten__()
            parts = [getattr(weight, name) for name in names]
            yield from with_storage(part for part in parts if isinstance(part, torch.Tensor))  # not the mesh of DTensor
        elif weight.layout is torch.strided:
            yield weight
