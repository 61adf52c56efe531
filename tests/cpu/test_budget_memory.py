# SPDX-License-Identifier: Apache-2.0
"""What a budget says of memory that weights fill, and of memory that runs out, in loops of any kind."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from offload_engine._devices.cuda_memory import CudaMemory
from offload_engine.errors import BudgetError
from tests.cpu.test_budget import Allocator, ByBytes, ByHand, ByLayers, config

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_budget_that_weights_fill_is_refused_before_the_first_step_and_not_before() -> None:
    """A model may come to the GPU, or be sharded, after its engine is made. What the allocator has cached is no matter.

    On the CPU device weights do not count.
    """
    model = [weight.clone() for weight in ByHand(config()).model.parameters()]
    message = "^gpu_budget is 4 MiB, but 5 MiB are taken before the first step, by weights, .*: raise it, or spread"
    for make in (ByHand, ByLayers, ByBytes):
        job = make(config(gpu_budget=4 << 20))
        gauge = Allocator(job)
        gauge.outside, gauge._reserved = 4 << 20, 1 << 30
        for _ in range(2):
            with pytest.raises(BudgetError, match=message):
                job.step(num_microbatches=1)
        assert all(map(torch.equal, model, job.model.parameters()))
        gauge.outside = (3 << 20) - 1
        job.step(num_microbatches=1)
        gauge.outside += 1
        job.step(num_microbatches=1)  # by then it is measured
    ByHand(config(gpu_budget=1)).step()


def test_what_is_taken_on_a_gpu_is_allocated_or_outside_the_allocator() -> None:
    held = {"allocated_bytes": {"all": {"current": 3}}, "reserved_bytes": {"all": {"current": 10}}}
    calls = {"memory_stats_as_nested_dict": held, "mem_get_info": (85, 100)}
    with mock.patch.multiple(torch.cuda, **{name: mock.Mock(return_value=value) for name, value in calls.items()}):
        assert CudaMemory(torch.device("cuda", 0)).taken_bytes() == 3 + (100 - 85 - 10)
