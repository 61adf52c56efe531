# SPDX-License-Identifier: Apache-2.0
"""Delays work on a stream, and finds whose memory it got."""

from __future__ import annotations

import torch

LATE_CYCLES = 200_000_000  # about 0.1 s: long enough that a missing wait is seen every time


def delay(stream: int) -> None:
    """Keep a stream busy.

    Args:
        stream: its handle; not that of the default stream.
    """
    with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
        torch.cuda._sleep(LATE_CYCLES)


def pool_of(tensor: torch.Tensor) -> int:
    """Return the handle of the stream from whose allocator pool the tensor's memory is."""
    address = tensor.data_ptr()
    [segment] = [s for s in torch.cuda.memory_snapshot() if 0 <= address - s["address"] < s["total_size"]]
    return int(segment["stream"])
