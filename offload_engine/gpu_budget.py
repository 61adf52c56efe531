# SPDX-License-Identifier: Apache-2.0
"""Converts a budget into bytes of a GPU, and refuses one that no step can meet. No torch here."""

from __future__ import annotations

from offload_engine.sizes import Size, least_margin_bytes, short_size


def resolve_budget(name: str, size: Size, total_bytes: int) -> int:
    """Return a budget in bytes; of "auto", the most that may come of it.

    Args:
        name: of the setting or of the flag, for errors.
        size: the budget.
        total_bytes: memory of the GPU; 0: there is no GPU, so that the budget bounds saved tensors.

    Raises:
        ValueError: if the budget is above the memory of the GPU, or depends on it and there is none.
    """
    if not total_bytes:
        if size.nbytes is None:
            raise ValueError(
                f"{name} {size} depends on the memory of a GPU, and there is none here: give a number of bytes, which "
                "then bounds saved tensors, such as 512MiB"
            )
        return size.nbytes
    nbytes = size.resolve(total_bytes, least_margin_bytes(total_bytes))
    if nbytes > total_bytes:
        raise ValueError(f"{name} {size} is above the {short_size(total_bytes)} of the GPU: lower it, or give auto")
    return nbytes


def below_held_text(name: str, budget_bytes: int, held_bytes: int) -> str:
    """Return a text that says that a budget is not above what is held before the first step, and what to do."""
    return (
        f"{name} is {short_size(budget_bytes)}, but {short_size(held_bytes)} are taken before the first step, by "
        "weights, gradients, other tensors, and memory outside torch: raise it, or spread the model over more GPUs"
    )
