"""`LayerBudget`: the bytes of some layers as a bound of what is on the device, learned while they run."""

from __future__ import annotations

from collections.abc import Sequence

from offload_engine._saved.storage import TensorGroup
from offload_engine.engine import OffloadEngine


class LayerBudget:
    """Bounds the resident bytes of an engine by those of so many layers, the largest so far.

    What a layer saves that another one has saved before, such as an output that is the next layer's input, comes on
    top: else there would be no room for a second layer beside it.
    """

    def __init__(self, engine: OffloadEngine, num_layers: int) -> None:
        self._engine = engine
        self._num_layers = num_layers
        self._largest_own_bytes = 0  # of what a layer saved first
        self._largest_shared_bytes = 0

    def note_layer(self, groups: Sequence[TensorGroup]) -> None:
        """The forward of a layer is over; these are its groups."""
        before = self._limit_bytes
        # Of copies: the collector may retire a storage meanwhile, which takes it out of its group.
        storages = {saved for group in groups for saved in list(group.storages)}
        shared_bytes = sum(saved.nbytes for saved in storages if saved.group not in groups)
        self._largest_own_bytes = max(self._largest_own_bytes, sum(group.own_bytes for group in groups))
        self._largest_shared_bytes = max(self._largest_shared_bytes, shared_bytes)
        if self._limit_bytes != before:
            self._engine.limit_resident(self._limit_bytes)

    @property
    def _limit_bytes(self) -> int:
        return self._num_layers * self._largest_own_bytes + self._largest_shared_bytes
