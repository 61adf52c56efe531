# SPDX-License-Identifier: Apache-2.0
"""Reads attributes of tensors on hot paths, several in one call.

`_tensor_reads.c` does the same for the compiled core, where a look-up takes longer than the read itself, and about
thirty are needed for each saved tensor.
"""

from __future__ import annotations

from typing import Any, Final

import torch

# Constants, because each saved tensor is compared with them.
_TENSOR: Final = torch.Tensor
_PARAMETER: Final = torch.nn.Parameter
_STRIDED: Final = torch.strided

Reads = tuple[Any, ...]
"""Attributes of a tensor: its storage; the storage's `_cdata`, bytes and address; the tensor's version; its place
(storage offset, shape, strides and dtype); whether it covers its storage contiguously; and whether it is lazily
conjugated or negated."""


def read_plain(tensor: torch.Tensor, device: torch.device, min_bytes: int) -> Reads | None:
    """Read a plain tensor on `device` whose storage has at least `min_bytes` bytes; return None for any other.

    A plain tensor is of the class `torch.Tensor` itself (a parameter is not an activation, and other subclasses may
    hold more than their storage), strided, not quantized, not nested, and not a view of a parameter; and it has bytes.
    """
    if type(tensor) is not _TENSOR or tensor.layout is not _STRIDED:
        return None
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    if nbytes < min_bytes:  # true for most tensors, so tested first
        return None
    if tensor.device != device or tensor.is_quantized or tensor.is_nested:  # nested: its sizes are not in its shape
        return None
    if type(tensor._base) is _PARAMETER:
        return None
    try:
        address = storage.data_ptr()
    except RuntimeError:  # a size, but no bytes: the storage of a tangent of zeros
        return None
    place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
    # Not `tensor.nbytes`: torch.compile may compile these frames, too, and cannot trace it with dynamic shapes.
    has_all = tensor.is_contiguous() and tensor.numel() * tensor.element_size() == nbytes
    is_lazy = tensor.is_conj() or tensor.is_neg()
    return storage, storage._cdata, nbytes, address, tensor._version, place, has_all, is_lazy


def is_unmodified(tensor: torch.Tensor, version: int, storage: torch.UntypedStorage, nbytes: int) -> bool:
    """Return whether `tensor` has this version, and `storage` this many bytes."""
    return tensor._version == version and storage.nbytes() == nbytes


def address_of(tensor: torch.Tensor, nbytes: int) -> int | None:
    """Return the address of the storage of `tensor`; None if its size is not `nbytes`."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() if storage.nbytes() == nbytes else None
