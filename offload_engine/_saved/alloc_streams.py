# SPDX-License-Identifier: Apache-2.0
"""`AllocStreams`: remembers which stream allocated a tensor that another stream saves."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload_engine._devices.base import Stream
from offload_engine._saved.storage import SavedStorage


class AllocStreams:
    """Maps tensors to the stream that allocated them, until the iteration ends.

    Attributes:
        streams: keyed by the address of the storage; the weak reference keeps the address from being reused.
    """

    def __init__(self) -> None:
        self.streams: dict[object, tuple[StorageWeakRef, Stream]] = {}

    def declare(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Record that the bytes of `tensor` belong to the memory pool of `stream`, whichever stream saves them."""

        storage = tensor.untyped_storage()
        self.streams[storage._cdata] = StorageWeakRef(storage), stream

    def apply_to(self, saved: SavedStorage) -> None:
        """Set `saved.alloc_stream` if a stream other than the saving one was declared."""
        found = self.streams.get(saved.key)
        if found is not None and found[1] != saved.stream:
            saved.alloc_stream = found[1]

    def clear(self) -> None:
        """Forget all tensors."""
        self.streams.clear()
