# SPDX-License-Identifier: Apache-2.0
"""What a comparison to the last bit rests on: without offload, the model gives the same bits each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.utils import deterministic

from offload_engine import FixedBounds, IterationStats, OffloadConfig

# Eight buffers of 4 MiB for each stream; PyTorch refuses its deterministic mode without this or `:16:8`.
CUBLAS_WORKSPACE = ":4096:8"

RELEASED_AT_ONCE = OffloadConfig(min_tensor_bytes=1, policy=FixedBounds(max_inflight_bytes=0))
"""What is copied out is released: so few bytes would stay otherwise, and none come back."""

T = TypeVar("T")
Bits = list[dict[str, str]]
"""The fingerprint of each step."""
_DETERMINISTIC: Any = deterministic


@contextmanager
def deterministic_algorithms(warn_only: bool = False) -> Iterator[None]:
    """Gradients are summed in one order.

    Args:
        warn_only: for models that choose their attention kernels themselves; else it warns of attention's backward and
            leaves that as it is.
    """
    was_enabled = torch.are_deterministic_algorithms_enabled()
    was_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    was_filling = _DETERMINISTIC.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    # Training has no such kernels: one for each new buffer would change what runs before what.
    _DETERMINISTIC.fill_uninitialized_memory = False
    try:
        yield
    finally:
        _DETERMINISTIC.fill_uninitialized_memory = was_filling
        torch.use_deterministic_algorithms(was_enabled, warn_only=was_warning)


def run_twice(run: Callable[[], T], are_equal: Callable[[T, T], bool]) -> T:
    """Return what two runs without offload give alike, that of the second: the first may have allocated workspaces.

    Args:
        run: builds and trains the model, without offload.
        are_equal: compares two results to the last bit.

    Raises:
        AssertionError: if they differ, which says nothing about offload.
    """
    first, second = run(), run()
    assert are_equal(first, second), (
        "two runs without offload differ: the model is not deterministic here, and offload was not tested. Expected "
        "the same bits under torch.use_deterministic_algorithms(True); look for an operator that ignores it"
    )
    return second


def check_bits(expected: Bits, got: Bits) -> None:
    """Fail with what differs in each step: how much of how much, the losses, and the first and last names."""
    wrong = [[name for name in a if a[name] != b[name]] for a, b in zip(expected, got, strict=True)]
    said = [
        f"step {step}: {len(names)} of {len(expected[step])}, losses {'differ' if 'losses' in names else 'equal'}, "
        f"{', '.join(names[:4])} to {', '.join(names[-4:])}"
        for step, names in enumerate(wrong)
        if names
    ]
    assert not said, "steps differ from those without offload:\n" + "\n".join(said)


def check_moved(stats: IterationStats | None) -> IterationStats:
    """Fail if nothing came back, or something is left; return the counters."""
    assert stats is not None and 0 < stats.copied_in_bytes <= stats.copied_out_bytes
    assert stats.num_storages_left == 0
    return stats


def peak_of_second(step: Callable[[], object]) -> int:
    """Return the most bytes allocated in the second of two calls, above what is there before it: all gradients."""
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
