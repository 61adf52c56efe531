# SPDX-License-Identifier: Apache-2.0
"""Prefetch where forwards and backwards run together: F0 | F1 | F2 B0 | F3 B1 | B2 | B3."""

from __future__ import annotations

import pytest
import torch

from offload_engine import ChunkKey, ChunkOffloadHandler, FixedBounds, OffloadConfig, OffloadEngine
from offload_engine.schedule import parse_actions
from tests.adversarial import AdversarialDevice

ACTIONS = parse_actions("F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3")
NUMEL, DEPTH = 64, 2


class Steps:
    """Chunks of two groups each, whose forwards and backwards are run from outside."""

    def __init__(self, is_combined: bool) -> None:
        self.device = AdversarialDevice()
        config = OffloadConfig(min_tensor_bytes=0, policy=FixedBounds(max_inflight_bytes=0, horizon_bytes=8 * NUMEL))
        self.engine = OffloadEngine(config, self.device)
        self.engine.begin_iteration(ACTIONS, is_combined=is_combined)
        self._chunks: dict[int, tuple[ChunkOffloadHandler, list[object]]] = {}

    def start(self, microbatch: int) -> None:
        """Its forward begins."""
        self._chunks[microbatch] = self.engine.start_chunk(ChunkKey(0, microbatch)), []

    def save(self, microbatch: int) -> None:
        """The forward of one group."""
        chunk, handles = self._chunks[microbatch]
        chunk.open_group("group")
        handles.append(chunk.tensor_push(torch.full((NUMEL,), float(microbatch))))
        chunk.close_group()

    def read(self, microbatch: int) -> None:
        """The backward of the last group that is left."""
        chunk, handles = self._chunks[microbatch]
        chunk.on_group_commit_backward(chunk.groups[len(handles) - 1])
        assert chunk.tensor_pop(handles.pop()).eq(microbatch).all()
        chunk.on_group_start_backward()


@pytest.mark.parametrize("is_combined", [True, False])
def test_the_chunk_of_the_next_backward_is_on_its_way_before_the_next_forward(is_combined: bool) -> None:
    steps = Steps(is_combined)
    for microbatch in (0, 1):
        steps.start(microbatch)
        # Behind the forward of 1 come, together, that of 2 and the backward of 0.
        assert steps.device.num_copies["in"] == (DEPTH if is_combined and microbatch == 1 else 0)
        for _ in range(DEPTH):
            steps.save(microbatch)
    steps.start(2)
    assert steps.device.num_copies["in"] == DEPTH
    for _ in range(DEPTH):
        steps.save(2)
        steps.read(0)
    # The next forward and the next backward begin together: its groups must be there by then.
    assert steps.device.num_copies["in"] == DEPTH + (DEPTH if is_combined else 0)
    steps.start(3)
    for _ in range(DEPTH):
        steps.save(3)
        steps.read(1)
    for microbatch in (2, 3):
        for _ in range(DEPTH):
            steps.read(microbatch)
    stats = steps.engine.end_iteration()
    assert stats.num_storages_left == 0
    # The end of the last forward is not reported; when the second backward behind it begins, it is.
    assert stats.prefetch_misses == (0 if is_combined else 1)
    assert steps.device.hazards == []
    steps.engine.close()
