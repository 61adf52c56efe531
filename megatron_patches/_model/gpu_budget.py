# SPDX-License-Identifier: Apache-2.0
"""Converts the user's budget into bytes of the training device, and checks it against the device's memory."""

from __future__ import annotations

import torch

from offload_engine.gpu_budget import below_held_text, resolve_budget
from offload_engine.sizes import Size

FLAG = "--offload-gpu-budget"
"""Of all messages about the budget of a run under Megatron."""


def budget_of(size: Size) -> int | str:
    """Return a budget for `OffloadConfig`, on the current GPU or, without a GPU, in bytes of saved tensors.

    A size or a share is returned in bytes; "auto" stays that, because the engine measures what it must leave.

    Raises:
        ValueError: if it is a share but there is no GPU, above the GPU's memory, or not above what is taken before the
            first step, mainly by weights; names the flag, the values and what to do.
    """
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    nbytes = resolve_budget(FLAG, size, total)
    if total:
        # What the allocator has cached will be used again. The engine would check this, too, but not name the flag.
        held = total - free - torch.cuda.memory_reserved() + torch.cuda.memory_allocated()
        if nbytes <= held:
            raise ValueError(below_held_text(f"{FLAG} {size}", nbytes, held))
    return "auto" if size == Size() else nbytes
