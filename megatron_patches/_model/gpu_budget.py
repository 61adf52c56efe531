# SPDX-License-Identifier: Apache-2.0
"""Converts a budget as given by the user into bytes of the device that trains, and checks it against what is there."""

from __future__ import annotations

import torch

from offload_engine.sizes import Size, format_bytes

_MARGIN_SHARE = 64
_MARGIN_BYTES = 512 << 20
"""Left by "auto" at least: communicators and libraries allocate after the first step, too."""


def budget_bytes(size: Size) -> int:
    """Return a budget in bytes, on the current GPU or, where there is none, of saved tensors.

    Raises:
        ValueError: if it is a share where there is no GPU, above what the GPU has, or below what it holds before the
            first step, weights first of all; names the flag, the values and what to do.
    """
    if not torch.cuda.is_available():
        if size.nbytes is None:
            raise ValueError(
                f"--offload-gpu-budget {size} depends on the memory of a GPU, and there is none here: give a number of "
                "bytes, which is then that of saved tensors, as 512MiB"
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
            "the first step, by weights, gradients, and what is outside of torch: raise it, or spread the model over "
            "more GPUs"
        )
    return nbytes
