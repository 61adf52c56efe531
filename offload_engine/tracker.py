# SPDX-License-Identifier: Apache-2.0
"""`SavedTensorTracker`: counts saved tensors without an engine, to measure a run without offload like one with it."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch

from offload_engine._saved.eligibility import with_storage
from offload_engine._saved.handles import StayingTensor, without_graph
from offload_engine.meter import ResidencyMeter


class SavedTensorTracker:
    """Counts on `meter` every tensor saved inside this context manager, unless inner hooks pack it.

    It moves nothing and changes no value: autograd gets back the saved tensor, detached.

    Args:
        meter: counts bytes from the moment autograd saves them until their graph is freed.
        weights: tensors whose storages are not activations (parameters, buffers).
    """

    def __init__(self, meter: ResidencyMeter, weights: Iterable[torch.Tensor] = ()) -> None:
        self._meter = meter
        self._weights: frozenset[int] = frozenset(w.untyped_storage().data_ptr() for w in with_storage(weights))
        self._hooks: list[torch.autograd.graph.saved_tensors_hooks] = []

    def __enter__(self) -> SavedTensorTracker:
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, StayingTensor.unpack)
        hooks.__enter__()
        self._hooks.append(hooks)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hooks.pop().__exit__(exc_type, exc, traceback)

    def _pack(self, tensor: torch.Tensor) -> StayingTensor:
        kept = without_graph(tensor)
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return StayingTensor(kept)
        if tensor.untyped_storage().data_ptr() in self._weights:
            return StayingTensor(kept)
        return _TrackedTensor(kept, self._meter)


class _TrackedTensor(StayingTensor):
    """Counts its tensor while autograd holds this object."""

    __slots__ = ("_storage", "_meter")

    def __init__(self, tensor: torch.Tensor, meter: ResidencyMeter) -> None:
        super().__init__(tensor)
        storage = tensor.untyped_storage()
        self._storage: int = storage._cdata
        self._meter = meter
        meter.hold(self._storage, storage.nbytes())

    def __del__(self) -> None:
        self._meter.drop(self._storage)
