# SPDX-License-Identifier: Apache-2.0
"""Makes the tensors that backward reads, and checks which of them it has written into.

Autograd compares version counters for tensors that it saves itself, and leaves that to the hooks for those they pack. A
backward may write into a tensor that it has saved, as scratch. That is an error only if the same bytes are read after
it: by another node, or by the same one if its graph is retained.

Before the bytes have left, an unpacked tensor shares the version counter of the saved one. A copied-in buffer has one
counter for the tensor that has all of it, and one for each tensor over a part, or in another form: parts that a module
has made of one storage may or may not have counters of their own. So the read of such a part raises if a tensor over
any of its bytes was written; see `SavedStorage.is_overwritten`.
"""

from __future__ import annotations

import torch

from offload_engine._saved.handles import PackedTensor
from offload_engine._saved.storage import SavedStorage


class UnpackedTensors:
    """Makes the tensors that backward reads.

    Args:
        device: of the saved tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._empties: dict[torch.dtype, torch.Tensor] = {}

    def uncopied(self, saved: SavedStorage, handle: PackedTensor) -> torch.Tensor:
        """Return a saved tensor whose bytes have never left, with its own version counter.

        Raises:
            RuntimeError: if it was modified in place since it was saved.
        """
        alias = saved.unmodified(id(handle))
        if alias is None:
            raise RuntimeError(
                f"a tensor saved for backward by {saved.group} has been modified by an inplace operation since; "
                "clone it before the modification"
            )
        tensor = alias.detach()
        if saved.is_as_saved or alias is not saved.buffer:
            return tensor
        assert saved.storage is not None
        tensor.data = handle.view(saved.storage, self._empty(handle))  # another form, and the same version counter
        return handle.lazily(tensor)

    def view(self, saved: SavedStorage, handle: PackedTensor) -> torch.Tensor:
        """Return a tensor over a part of a copied-in buffer, or in another form than the buffer."""
        assert saved.buffer is not None
        if saved.views is None:
            saved.views = []
        for place, view in saved.views:
            if place is handle.place:  # unpacked before
                tensor = view.detach()
                break
        else:
            tensor = handle.view(saved.buffer.untyped_storage(), self._empty(handle))
            saved.views.append((handle.place, tensor))
        return handle.lazily(tensor) if handle.is_lazy else tensor

    def _empty(self, handle: PackedTensor) -> torch.Tensor:
        dtype = handle.place[3]
        empty = self._empties.get(dtype)
        if empty is None:
            empty = self._empties[dtype] = torch.empty(0, dtype=dtype, device=self._device)
        return empty


def check_not_overwritten(saved: SavedStorage, handle: PackedTensor) -> None:
    """Check that no backward has written into the bytes of `handle` in a copied-in storage.

    Raises:
        RuntimeError: if one has.
    """
    if saved.is_overwritten(handle.place):
        raise _overwritten(saved)


def _overwritten(saved: SavedStorage) -> RuntimeError:
    return RuntimeError(
        f"a tensor saved for backward by {saved.group} has been modified by an inplace operation since it came back, "
        "by another backward that reads the same bytes or by an earlier run of its own; let that write into a clone"
    )
