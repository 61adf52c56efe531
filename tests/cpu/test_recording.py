# SPDX-License-Identifier: Apache-2.0
"""The handle of every front-end records steps and reports them, and what is recorded changes no result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_engine import (
    CheckpointOffload,
    OffloadConfig,
    checkpoint,
    enable_activation_offloading,
    manage_activations,
    offload_wrapper,
)
from offload_engine._observe.chrome_trace import read_records
from offload_engine.frontends.integrations._training import TrainingOffload
from tests.checkpointed import (
    Stack,
    first_recomputation,  # noqa: F401 (a fixture)
    make_stack,
)
from tests.decoders import HIDDEN

CONFIG = OffloadConfig(min_tensor_bytes=1, directory="none")
FrontEnd = tuple[torch.nn.Module, Any, AbstractContextManager[Any]]
"""A model, its handle, and what its forward runs in."""


def by_layers() -> FrontEnd:
    model = Stack()
    return model, enable_activation_offloading(model, "none", config=CONFIG), nullcontext()


def by_bytes() -> FrontEnd:
    model = Stack()
    handle = manage_activations(model, CONFIG, group_bytes=1)
    return model, handle, handle


def by_checkpoints() -> FrontEnd:
    handle = CheckpointOffload(CONFIG)
    return Stack(call=checkpoint), handle, handle


def by_wrapper() -> FrontEnd:
    model: Any = offload_wrapper(make_stack(), config=CONFIG)
    return model, model.activation_offload, nullcontext()


def step(model: torch.nn.Module, around: AbstractContextManager[Any]) -> list[torch.Tensor]:
    """Loss and gradients, with the same dropout every time."""
    torch.manual_seed(1)
    model.zero_grad()
    with around:
        loss = model(torch.linspace(-1, 1, 8 * HIDDEN).view(8, HIDDEN))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("front_end", [by_layers, by_bytes, by_checkpoints, by_wrapper])
def test_a_step_is_recorded_and_reported(front_end: Callable[[], FrontEnd], tmp_path: Path) -> None:
    model, handle, around = front_end()
    expected = step(model, around)
    assert "groups offloaded" in handle.report() and "Saved tensors" not in handle.report()
    handle.record(tmp_path / "step{step}.json")
    assert all(map(torch.equal, step(model, around), expected))
    record = handle.engine.last_record
    assert record is not None and record.groups
    assert "Saved tensors by module, step 1" in handle.report() and "Links and waits" in handle.report()
    handle.record()
    step(model, around)
    assert "step 2" in handle.report()
    handle.engine.close()
    assert read_records(tmp_path / "step1.json") == [record] and len(list(tmp_path.iterdir())) == 1


def test_a_trainer_may_be_asked_before_it_trains(tmp_path: Path) -> None:
    offload, model = TrainingOffload(CONFIG, False, None), Stack()
    assert offload.report() is None
    offload.record(tmp_path / "step{step}.json")
    offload.attach(model)
    step(model, nullcontext())
    assert "step 0" in str(offload.report())
    offload.record(tmp_path / "step{step}.json")
    step(model, nullcontext())
    offload.detach()
    assert "step 1" in str(offload.report()), "of the training that is over"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step0.json", "step1.json"]
    offload.attach(model)
    step(model, nullcontext())
    assert "Saved tensors" not in str(offload.report()), "asked for once"
    offload.detach()
