"""`AllocStreams`: which stream's memory pool owns a tensor that another stream saves."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload_engine._devices.base import Stream
from offload_engine._saved.storage import SavedStorage


class AllocStreams:
    """Remembers the stream that made a tensor, until the tensor is saved or the iteration ends."""

    def __init__(self) -> None:
        self._streams: dict[int, tuple[StorageWeakRef, Stream]] = {}  # the weak reference keeps the address

    def __len__(self) -> int:
        return len(self._streams)

    def declare(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Declare that the bytes of `tensor` return to the pool of `stream`, whichever stream saves them."""
        storage = tensor.untyped_storage()
        self._streams[storage._cdata] = StorageWeakRef(storage), stream

    def apply_to(self, saved: SavedStorage) -> None:
        """Set `saved.alloc_stream` where another stream than the one that saves was declared."""
        found = self._streams.get(saved.key)
        if found is not None and found[1] != saved.stream:
            saved.alloc_stream = found[1]

    def clear(self) -> None:
        """Forget all tensors."""
        self._streams.clear()
