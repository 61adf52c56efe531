# SPDX-License-Identifier: Apache-2.0
"""Defines why a saved tensor moved or stayed, and what to do about it."""

from __future__ import annotations

import enum
from collections.abc import Container
from typing import Final

import torch


class Reason(enum.Enum):
    """Why one saved tensor moved or stayed."""

    MOVED = "moved"
    """Its storage left the device and came back."""
    RECALLED = "recalled"
    """Copied out, but needed again before its release."""
    KEPT = "kept"
    """The plan keeps its group: its backward comes at once."""
    FITS = "fits"
    """The bound on resident bytes had room for its group."""
    DRY_RUN = "dry run"
    """Nothing moves in a dry run."""
    NO_ROOM = "no room on host"
    """The host tier had no room for its group."""
    NOT_ASKED = "not asked for"
    """Saved outside every group: its module is not among the requested ones."""
    SHARED = "shared"
    """Other tensors hold its storage, more than were declared, so that no byte would have been freed."""
    MODIFIED = "modified"
    """Written in place after its save: the bytes on the device are no longer those that its backward needs."""
    TOO_SMALL = "too small"
    """Its storage is smaller than the least size that moves."""
    WEIGHT = "weight"
    """A parameter, a buffer, or a view of one."""
    EXCLUDED = "excluded"
    """Excluded by `OffloadEngine.exclude`, by TransformerEngine, or by the checker of its chunk."""
    OTHER_DEVICE = "other device"
    """On another device than the one whose tensors move."""
    TYPE = "type"
    """A subclass of `torch.Tensor`, which may hold more than its storage."""
    NOT_STRIDED = "not strided"
    """Sparse, or of another layout without one storage."""
    FORM = "form"
    """Quantized, nested or without bytes: its storage does not describe it."""


STAYED_ON_PURPOSE: Final = frozenset({Reason.KEPT, Reason.FITS})

ADVICE: Final = {
    Reason.MOVED: "-",
    Reason.RECALLED: "raise horizon_bytes or offload earlier modules instead: the copy-out was in vain",
    Reason.KEPT: "nothing: a copy would only make its backward wait",
    Reason.FITS: "lower resident_bytes to move it",
    Reason.DRY_RUN: "run without dry_run",
    Reason.NO_ROOM: "raise host_limit_bytes, or offload fewer modules",
    Reason.NOT_ASKED: "add its module to the requested ones",
    Reason.SHARED: "add the other module that saves it, or declare its holders with held_elsewhere()",
    Reason.MODIFIED: "do not modify it in place after its save",
    Reason.TOO_SMALL: "lower min_tensor_bytes, if many add up",
    Reason.WEIGHT: "nothing: weights never move",
    Reason.EXCLUDED: "nothing, unless it was excluded by mistake",
    Reason.OTHER_DEVICE: "nothing: it takes no memory on this device",
    Reason.TYPE: "save the plain tensor inside it",
    Reason.NOT_STRIDED: "nothing: only strided tensors move",
    Reason.FORM: "nothing: such tensors do not move",
}


def reason_to_stay(
    tensor: torch.Tensor,
    torch_device: torch.device,
    min_bytes: int,
    weights: Container[int],
    excluded: Container[int],
) -> Reason | None:
    """Return why a saved tensor may not move, or None if it may. Slow; for recordings only.

    The tests are those of `Eligibility.read_movable`, each with its own answer.

    Args:
        tensor: as autograd saves it.
        torch_device: whose tensors move.
        min_bytes: smaller storages stay.
        weights: addresses of the storages of weights.
        excluded: `_cdata` of the excluded storages.
    """
    if isinstance(tensor, torch.nn.Parameter):
        return Reason.WEIGHT
    if type(tensor) is not torch.Tensor:
        return Reason.TYPE
    if tensor.layout is not torch.strided:
        return Reason.NOT_STRIDED
    if tensor.device != torch_device:
        return Reason.OTHER_DEVICE
    if tensor.is_quantized or tensor.is_nested or tensor._is_zerotensor():
        return Reason.FORM
    storage = tensor.untyped_storage()
    if storage.data_ptr() in weights or (tensor._is_view() and isinstance(tensor._base, torch.nn.Parameter)):
        return Reason.WEIGHT
    if hasattr(tensor, "_TE_do_not_offload") or storage._cdata in excluded:
        return Reason.EXCLUDED
    return Reason.TOO_SMALL if storage.nbytes() < max(1, min_bytes) else None
