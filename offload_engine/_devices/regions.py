# SPDX-License-Identifier: Apache-2.0
"""Handles raw bytes: regions on the host, tensors over storages, and the checks before every copy."""

from __future__ import annotations

from typing import Any, Final, Protocol

import torch

from offload_engine._compat import reads, torch_private

_address_of: Final[Any] = reads.address_of

TensorSpec = tuple[Any, ...]
"""Storage offset, shape, strides and dtype of a tensor, all in elements: which bytes of its storage it has.

A tuple without a fixed length, because each saved tensor has one, and the compiled core would copy one of fixed length
field by field.
"""


class HostSlab(Protocol):
    """A contiguous range of host-tier bytes (pinned memory, plain memory or part of a file)."""

    nbytes: int

    def close(self) -> None:
        """Return the bytes to the system. Idempotent; no copy may be in flight."""


class HostRegion:
    """Bytes `offset .. offset + nbytes` of a slab: the source of a copy-in, the target of a copy-out."""

    __slots__ = ("slab", "offset", "nbytes")

    def __init__(self, slab: HostSlab, offset: int, nbytes: int) -> None:
        self.slab = slab
        self.offset = offset
        self.nbytes = nbytes


def check_copy(tensor: torch.Tensor, region: HostRegion) -> int:
    """Check that a copy between the storage of `tensor` and `region` touches no other byte; return its address.

    Raises:
        ValueError: if the storage is not of the region's size, or the region is not inside its slab.
    """
    return check_copy_within(tensor, region, region.slab.nbytes)


def check_copy_within(tensor: torch.Tensor, region: HostRegion, slab_bytes: int) -> int:
    """Work as `check_copy`, for a caller that knows how many bytes the slab has."""
    nbytes = region.nbytes
    address: int | None = _address_of(tensor, nbytes)
    if address is None:
        found = tensor.untyped_storage().nbytes()
        raise ValueError(f"a copy of {nbytes:,} bytes needs a storage of that size, got one of {found:,}")
    if region.offset < 0 or region.offset + nbytes > slab_bytes:
        raise ValueError(f"bytes {region.offset:,} .. {region.offset + nbytes:,} are not inside {region.slab}")
    return address


def new_buffer(nbytes: int, spec: TensorSpec | None, device: torch.device) -> torch.Tensor:
    """Return a tensor over all of a new, uninitialized storage of `nbytes` bytes: 1-D uint8, or of `spec`."""
    if spec is None:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    _, shape, stride, dtype = spec
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def whole(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a 1-D uint8 tensor over all of `storage`."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload]


def storage_at(address: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """Return a storage over bytes that it does not own."""

    return torch_private.storage_at(address, device, nbytes)


def check_slab_size(nbytes: int, alignment: int) -> None:
    """Check the size of a requested slab.

    Raises:
        ValueError: if `nbytes` is not a positive multiple of `alignment`.
    """
    if nbytes <= 0 or nbytes % alignment:
        raise ValueError(f"a slab must be a positive multiple of {alignment} bytes, got {nbytes:,}")
