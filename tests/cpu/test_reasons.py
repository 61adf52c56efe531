# SPDX-License-Identifier: Apache-2.0
"""Each reason why a saved tensor moved or stayed, in a recorded step of the real engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from offload_engine import (
    ChunkOffloadHandler,
    FixedBounds,
    GroupTraits,
    OffloadConfig,
    OffloadEngine,
    ResidentBudget,
)
from offload_engine._devices.cpu import CpuDevice
from offload_engine._observe.reasons import Reason
from offload_engine._observe.record import StepRecord
from tests.adversarial import AdversarialDevice
from tests.cpu.test_observe_recorder import candidates

NUMEL = 1024
Save = Callable[[OffloadEngine, ChunkOffloadHandler], Any]


def in_group(tensor: torch.Tensor, chunk: ChunkOffloadHandler, *, keep: bool = False, writes: bool = False) -> Any:
    chunk.open_group("attention", GroupTraits(keep=keep))
    handle = chunk.hooks.pack(tensor)
    if writes:
        tensor.add_(1)
    chunk.close_group()
    return handle


def moved(engine: OffloadEngine, chunk: ChunkOffloadHandler) -> Any:
    return in_group(torch.ones(NUMEL), chunk)


def recalled(engine: OffloadEngine, chunk: ChunkOffloadHandler) -> Any:
    handle = in_group(torch.ones(NUMEL), chunk)
    chunk.recall_groups()
    return handle


def kept(engine: OffloadEngine, chunk: ChunkOffloadHandler) -> Any:
    return in_group(torch.ones(NUMEL), chunk, keep=True)


def outside_groups(engine: OffloadEngine, chunk: ChunkOffloadHandler) -> Any:
    return chunk.hooks.pack_ungrouped(torch.ones(NUMEL))


def held_by_more_than_declared(engine: OffloadEngine, chunk: ChunkOffloadHandler) -> Any:
    tensor = torch.ones(NUMEL)
    other = tensor.detach()
    handle = in_group(tensor, chunk)
    engine.held_elsewhere(tensor)
    return handle, tensor, other


def modified_before_its_commit(engine: OffloadEngine, chunk: ChunkOffloadHandler) -> Any:
    return in_group(torch.ones(NUMEL), chunk, writes=True)


def modified_behind_its_commit(engine: OffloadEngine, chunk: ChunkOffloadHandler) -> Any:
    tensor = torch.ones(NUMEL)
    handle = in_group(tensor, chunk)
    tensor.add_(1)
    return handle


def excluded(engine: OffloadEngine, chunk: ChunkOffloadHandler) -> Any:
    tensor = torch.ones(NUMEL)
    engine.exclude(tensor)
    return in_group(tensor, chunk)


LATE = FixedBounds(max_inflight_bytes=1 << 30)
CASES: list[tuple[Save, Reason, dict[str, Any]]] = [
    (moved, Reason.MOVED, {}),
    (recalled, Reason.RECALLED, {"policy": LATE}),
    (kept, Reason.KEPT, {}),
    (moved, Reason.FITS, {"policy": ResidentBudget(1 << 30)}),
    (moved, Reason.DRY_RUN, {"dry_run": True}),
    (moved, Reason.NO_ROOM, {"host_limit_bytes": 2 * NUMEL, "min_tensor_bytes": NUMEL}),
    (outside_groups, Reason.NOT_ASKED, {}),
    (held_by_more_than_declared, Reason.SHARED, {"policy": LATE}),
    (modified_before_its_commit, Reason.MODIFIED, {}),
    (modified_behind_its_commit, Reason.MODIFIED, {"policy": LATE}),
    (excluded, Reason.EXCLUDED, {}),
]


def record_of(save: Save, **settings: Any) -> StepRecord:
    """Record the second step of one group; in the first a policy learns sizes."""
    engine = OffloadEngine(OffloadConfig(**{"min_tensor_bytes": 1024, **settings}), AdversarialDevice())
    for step in range(2):
        if step:
            engine.record()
        with engine.iteration():
            chunk = engine.start_chunk(has_head=True)
            held = save(engine, chunk)
            chunk.begin_head()  # releases what is being copied out
            chunk.on_group_commit_backward()
            del held
    assert engine.last_record is not None
    return engine.last_record


@pytest.mark.parametrize(("save", "reason", "settings"), CASES, ids=lambda case: getattr(case, "__name__", None))
def test_reason_of_a_storage_that_might_have_moved(save: Save, reason: Reason, settings: dict[str, Any]) -> None:
    (saved,) = record_of(save, **settings).saved
    assert (saved.reason, saved.shape, saved.dtype, saved.nbytes) == (reason, (NUMEL,), "float32", 4 * NUMEL)


@pytest.mark.parametrize("name", [name for name, (_, reason) in candidates().items() if reason is not None])
def test_reason_of_a_tensor_that_may_not_move(name: str) -> None:
    tensor, reason = candidates()[name]
    saved = record_of(lambda engine, chunk: in_group(tensor, chunk)).saved[0]
    assert (saved.reason, saved.shape) == (reason, tuple(tensor.shape))


def test_a_closed_engine_takes_its_hooks_off() -> None:
    hooks = nn.modules.module._global_forward_pre_hooks
    num_before = len(hooks)
    engine = OffloadEngine(device=CpuDevice("none"))
    engine.record()
    engine.record()
    assert len(hooks) == num_before + 1
    engine.close()
    assert len(hooks) == num_before
