# SPDX-License-Identifier: Apache-2.0
"""Converts the user's budget into bytes of the training device, and checks it against the device's memory."""

from __future__ import annotations

import torch

from offload_engine.sizes import LEAST_MARGIN_BYTES, Size, format_bytes


def budget_of(size: Size) -> int | str:
    """Return a budget for `OffloadConfig`, on the current GPU or, without a GPU, in bytes of saved tensors.

    A size or a share is returned in bytes; "auto" stays that, because the engine measures what it must leave.

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
    nbytes = checked(size, total, held)
    return "auto" if size == Size() else nbytes


def checked(size: Size, total_bytes: int, held_bytes: int) -> int:
    """Return a budget in bytes on a GPU with `total_bytes`, of which `held_bytes` are taken before the first step.

    Of "auto" it is the most that may come of it.

    Raises:
        ValueError: as `budget_of`.
    """
    nbytes = size.resolve(total_bytes, LEAST_MARGIN_BYTES)
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
