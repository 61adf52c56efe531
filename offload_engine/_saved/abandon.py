# SPDX-License-Identifier: Apache-2.0
"""`abandon`: abandons saved storages after an exception, whatever state it has left them in."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress

import torch

from offload_engine._devices.base import CopyError
from offload_engine._saved.counters import ByteCounters
from offload_engine._saved.storage import RETIRED, SavedStorage
from offload_engine._saved.transfers import TransferContext, join_copy_streams, refill, release_buffer

logger = logging.getLogger(__name__)


def abandon(storages: Iterable[SavedStorage], counters: ByteCounters, context: TransferContext) -> None:
    """Wait for every copy, refill storages that outside references hold, and release all others. Idempotent."""
    _wait_for_all_copies(context)
    held = []
    for saved in storages:
        if saved.is_still_held():
            held.append(saved)
        else:
            _abandon_one(saved, counters, context)
    refilled = [_refill(saved, context) for saved in held]  # last, when the memory of all others is free
    _wait_for_all_copies(context)
    refilled.clear()
    for saved in held:
        _abandon_one(saved, counters, context)


def _wait_for_all_copies(context: TransferContext) -> None:
    """Block the host until every copy has completed or failed."""
    device = context.device
    if context.is_captured and device.graphs is not None and device.graphs.is_capturing():
        with suppress(CopyError):  # CUDA may have ended the capture already
            join_copy_streams(context)  # otherwise the capture could not end, and CUDA's error would hide the cause
        return
    for stream in (context.copy_out_stream, context.copy_in_stream):
        try:
            device.synchronize(device.record_event(stream))
        except CopyError as error:
            logger.warning("a copy failed before the reset: %s", error)


def _abandon_one(saved: SavedStorage, counters: ByteCounters, context: TransferContext) -> None:
    saved.pending = saved.copied_out = None  # complete or failed: no copy touches these bytes any more
    if saved.buffer is not None:
        with suppress(KeyError):  # the meter may have been interrupted, too
            counters.count_release(saved)
        release_buffer(saved, context)
    saved.emptied = saved.lease = None
    saved.residency = RETIRED  # not by `move`: the counters of its groups may be wrong
    # Breaks the reference cycle of storage and groups, which would keep the events of its copies alive.
    for group in (saved.group, *saved.sharers):
        group.storages.pop(saved, None)
    saved.unpin_address()


def _refill(saved: SavedStorage, context: TransferContext) -> torch.Tensor | None:
    """Issue a copy-in for the remaining holders of an emptied storage; return its bytes, to be kept until then."""
    try:
        return refill(saved, context)
    except torch.OutOfMemoryError as error:  # for instance while the step ends with such an error
        logger.warning("no memory to refill a tensor of %s that is held elsewhere: %s", saved.group, error)
        return None
