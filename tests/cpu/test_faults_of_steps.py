# SPDX-License-Identifier: Apache-2.0
"""What goes wrong around the engine: no memory for its own buffers, steps that a gradient scaler skips."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from offload_engine import IS_COMPILED, OffloadConfig, enable_activation_offloading
from tests.adversarial import AdversarialDevice
from tests.interrupts.jobs import JOBS, WIDTH, Model

CONFIG = OffloadConfig(min_tensor_bytes=0, directory="none")


@pytest.mark.skipif(IS_COMPILED, reason="the store has bound the method that this replaces")
@pytest.mark.parametrize("name", JOBS)
def test_after_no_memory_for_any_of_the_engines_buffers_the_next_step_is_equal(
    name: str, device: AdversarialDevice
) -> None:
    num_left, expected = 0, JOBS[name](None).step()

    def fail_or_allocate(*args: Any, **options: Any) -> torch.Tensor:
        nonlocal num_left
        num_left -= 1
        if num_left == 0:
            raise torch.OutOfMemoryError("no memory, says the test")
        return allocate(*args, **options)

    job = JOBS[name](device)
    job.step()
    allocate, num_failed = device.allocate, 0
    for number in range(1, 200):
        num_left = number
        with mock.patch.object(device, "allocate", fail_or_allocate), suppress(torch.OutOfMemoryError):
            job.step()
            assert num_left > 0, "the step went on without its buffer"
            break
        num_failed += 1
        job.recover()
        assert all(map(torch.equal, job.step(), expected))
        assert job.engine is not None and not job.engine.has_saved and job.engine.pool.num_leases == 0
    assert num_failed > 0, "nothing is copied in"
    job.close()


def train_with_scaler(model: nn.Module) -> tuple[list[float], int]:
    """Train in fp16 fashion; return the scales, and how many steps were skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales, num_skipped = [], 0
    for number in range(8):
        optimizer.zero_grad()
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number)) * 1e3
        scaler.scale(model(x).pow(2).sum() * 1e3).backward()
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        num_skipped += all(map(torch.equal, before, model.parameters()))
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, num_skipped


def test_a_gradient_scaler_skips_the_same_steps_and_comes_to_the_same_weights() -> None:
    plain = Model()
    offloaded = copy.deepcopy(plain)
    expected = train_with_scaler(plain)
    handle = enable_activation_offloading(offloaded, "none", config=CONFIG)
    assert train_with_scaler(offloaded) == expected and 0 < expected[1] < 8, expected
    assert all(map(torch.equal, plain.parameters(), offloaded.parameters()))
    assert handle.stats.copied_out_bytes > 0
    handle.remove()
