# SPDX-License-Identifier: Apache-2.0
"""What goes wrong around the engine: there is no memory for its own buffers."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch

from offload_engine import IS_COMPILED
from tests.adversarial import AdversarialDevice
from tests.interrupts.jobs import JOBS


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
