"""The examples of the integrations train on a GPU, with the losses of the run without offload."""

from __future__ import annotations

import pytest
import torch

from tests.cpu.test_examples import NEEDS, losses


@pytest.mark.parametrize("name", NEEDS)
def test_losses_are_those_without_offload(name: str) -> None:
    num_ranks = min(2, torch.cuda.device_count())  # one pipeline rank has both of its stages
    with_offload = losses(name, num_ranks=num_ranks)
    assert with_offload == losses(name, "--no-offload", num_ranks=num_ranks)
    assert float(with_offload[-1]) < float(with_offload[0])


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_schedules_that_split_or_overlap_backward(schedule: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("a pipeline of two ranks needs two GPUs; a machine with two makes this run")
    options = ("--schedule", schedule)
    assert losses("with_pipelining.py", *options) == losses("with_pipelining.py", *options, "--no-offload")
