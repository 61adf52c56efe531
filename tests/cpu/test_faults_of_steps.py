# SPDX-License-Identifier: Apache-2.0
"""What goes wrong around the engine: no memory for its own buffers, steps that a gradient scaler skips."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from offload_engine import IS_COMPILED, OffloadConfig, enable_activation_offloading
from tests.adversarial import AdversarialDevice
from tests.interrupts.jobs import JOBS

CONFIG = OffloadConfig(min_tensor_bytes=0, directory="none")


class NoMemory:
    """Has one allocation of a device fail, as CUDA's allocator does.

    Args:
        device: whose allocations these are.
        number: of the one that fails; 1 is the first.
    """

    def __init__(self, device: AdversarialDevice, number: int) -> None:
        self.num_left = number
        self._device = device
        self._allocate = device.allocate
        device.allocate = self._fail_or_allocate  # type: ignore[method-assign]

    def _fail_or_allocate(self, *args: Any, **options: Any) -> torch.Tensor:
        self.num_left -= 1
        if self.num_left == 0:
            raise torch.OutOfMemoryError("no memory, says the test")
        return self._allocate(*args, **options)

    def end(self) -> None:
        self._device.allocate = self._allocate  # type: ignore[method-assign]


@pytest.mark.skipif(IS_COMPILED, reason="the store has bound the method that this replaces")
@pytest.mark.parametrize("name", JOBS)
def test_after_no_memory_for_any_of_the_engines_buffers_the_next_step_is_equal(name: str) -> None:
    expected = JOBS[name](None).step()
    device = AdversarialDevice()
    job = JOBS[name](device)
    job.step()
    num_failed = 0
    for number in range(1, 200):
        fault = NoMemory(device, number)
        try:
            job.step()
        except torch.OutOfMemoryError:
            num_failed += 1
        finally:
            fault.end()
        if fault.num_left > 0:
            break
        assert num_failed == number, "the step went on without its buffer"
        job.recover()
        assert all(map(torch.equal, job.step(), expected))
        assert job.engine is not None and not job.engine.has_saved and job.engine.pool.num_leases == 0
    assert num_failed > 0, "nothing is copied in"
    assert not device.hazards
    job.close()


def train_with_scaler(model: nn.Module, step: Callable[[torch.Tensor], torch.Tensor]) -> tuple[list[float], int]:
    """Train in fp16 fashion; return the scales, and how many steps were skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales, num_skipped = [], 0
    for number in range(8):
        optimizer.zero_grad()
        scaler.scale(step(torch.randn(8, 32, generator=torch.Generator().manual_seed(number)) * 1e3)).backward()
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        num_skipped += all(map(torch.equal, before, model.parameters()))
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, num_skipped


def test_a_gradient_scaler_skips_the_same_steps_and_comes_to_the_same_weights() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Sigmoid()) for _ in range(4)))

    plain, offloaded = make(), make()
    expected = train_with_scaler(plain, lambda x: plain(x).pow(2).sum() * 1e3)
    handle = enable_activation_offloading(offloaded, "none", layers=list(offloaded), config=CONFIG)
    assert train_with_scaler(offloaded, lambda x: offloaded(x).pow(2).sum() * 1e3) == expected
    assert all(map(torch.equal, plain.parameters(), offloaded.parameters()))
    assert handle.stats.copied_out_bytes > 0 and 0 < expected[1] < 8, expected
    handle.remove()
