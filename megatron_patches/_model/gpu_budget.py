# SPDX-License-Identifier: Apache-2.0
"""Converts the user's budget into bytes of the training device, and checks it against the device's memory."""

from __future__ import annotations

import torch

from offload_engine.sizes import Size, format_bytes

_MARGIN_SHARE = 64
_MARGIN_BYTES = 512 << 20
"""The least that "auto" leaves free: communicators and libraries allocate after the first step, too."""


def budget_bytes(size: Size) -> int:
    """Return a budget in bytes, on the current GPU or, without a GPU, of saved tensors.

    Raises:
        ValueError: if it is a share but there is no GPU, above the GPU's memory, or below what is taken before the
            first step, mainly by weights; names the flag, the values and what to do.
    """
    if not torch.cuda.is_available():
        if size.nbytes is None:
            raise ValueError(
                f"--offload-gpu-budget {size} depends on the memory of a GPU, and there is none here: give a number of "
                "bytes, which then bounds saved tensors, such as 512MiB"
            )
        return size.nbytes
    free, total = torch.cuda.mem_get_info()
    held = total - free - torch.cuda.memory_reserved() + torch.cuda.memory_allocated()
    return checked(size, total, held)


def checked(size: Size, total_bytes: int, held_bytes: int) -> int:
    """Return a budget in bytes on a GPU with `total_bytes`, of which `held_bytes` are taken before the first step.

    Raises:
        ValueError: as `budget_bytes`.
    """
    nbytes = size.resolve(total_bytes, max(total_bytes // _MARGIN_SHARE, _MARGIN_BYTES))
    if nbytes > total_bytes:
        raise ValueError(
            f"--offload-gpu-budget {size} is above the {format_bytes(total_bytes)} of the GPU: lower it, or give auto"
        )
    if nbytes <= held_bytes:
        raise ValueError(
            f"--offload-gpu-budget {size} is {format_bytes(nbytes)}, but {format_bytes(held_bytes)} are taken before "
            "the first step, by weights, gradients, and memory outside torch: raise it, or spread the model over more "
            "GPUs"
        )
    return nbytes
