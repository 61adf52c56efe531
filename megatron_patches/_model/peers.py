# SPDX-License-Identifier: Apache-2.0
"""`Peers`: exchanges numbers among the ranks that must decide alike within a budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Peers:
    """Exchanges numbers with the other ranks of this rank's pipeline stage, or with all ranks of the job.

    Uses megatron-core's process groups, one after the other, so every rank must make the same calls.

    Args:
        stage: process groups whose product is the stage: its data and context parallel ranks, and its tensor parallel
            ranks. These include expert parallel ranks.
        pipeline: the pipeline-parallel process group, or None.
    """

    def __init__(self, stage: Sequence[Any], pipeline: Any) -> None:
        self._stage = tuple(group for group in stage if group.size() > 1)
        self._all = (*self._stage, *([pipeline] if pipeline is not None and pipeline.size() > 1 else []))

    @property
    def is_alone(self) -> bool:
        """Return whether this rank is the only one of its stage."""
        return not self._stage

    def largest_of_stage(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the largest of each number over the ranks of the stage. Collective."""
        return _largest(numbers, self._stage)

    def largest_of_all(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the largest of each number over all ranks. Collective."""
        return _largest(numbers, self._all)


def _largest(numbers: tuple[int, ...], groups: Sequence[Any]) -> tuple[int, ...]:
    for group in groups if numbers else ():
        tensor = torch.tensor(numbers, dtype=torch.int64, device=_device_of(group))
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX, group=group)
        numbers = tuple(tensor.tolist())
    return numbers


def _device_of(group: Any) -> torch.device:
    """Return the device of a group's tensors: NCCL requires the GPU."""
    is_cuda = "nccl" in torch.distributed.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
