# SPDX-License-Identifier: Apache-2.0
"""What a budget says on a GPU that weights fill, and where memory runs out in a plain loop."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from offload_engine import BudgetError, OffloadConfig, enable_activation_offloading
from offload_engine._devices.cuda_memory import CudaMemory

TOO_MUCH = 1 << 45


class Hungry(torch.autograd.Function):
    """Its backward allocates more than any GPU has, in C++, where no frame is the engine's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad + torch.empty(TOO_MUCH, dtype=torch.uint8, device="cuda").sum()


def make_model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).cuda()


def test_a_backward_that_runs_out_of_memory_is_explained_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    handle = enable_activation_offloading(
        model, "none", config=OffloadConfig(gpu_budget="auto"), layers=list(model.children())
    )
    memory = handle.engine.device.memory
    assert isinstance(memory, CudaMemory)
    with caplog.at_level(logging.WARNING):
        memory.reserve(TOO_MUCH)
        assert not caplog.records
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                Hungry.apply(model(torch.randn(1024, 1024, device="cuda"))).square().mean().backward()
    [record] = caplog.records
    assert record.message.startswith("out of GPU memory: gpu_budget is ")
    handle.remove()
    caplog.clear()
    memory.reserve(TOO_MUCH)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(TOO_MUCH, dtype=torch.uint8, device="cuda")
    assert not caplog.records


def test_a_budget_that_weights_fill_is_refused_before_the_first_step() -> None:
    """What the allocator has cached is no matter."""
    model = make_model()
    torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    handle = enable_activation_offloading(
        model, "none", config=OffloadConfig(gpu_budget=1 << 20), layers=list(model.children())
    )
    memory = handle.engine.device.memory
    assert memory is not None and 4 * 1024 * 1024 * 4 < memory.taken_bytes() <= memory.held_bytes() - (4 << 30)
    with pytest.raises(BudgetError, match=r"^gpu_budget is 1 MiB, but .* are taken before the first step, by weights"):
        model(torch.randn(1024, 1024, device="cuda"))
    handle.remove()
