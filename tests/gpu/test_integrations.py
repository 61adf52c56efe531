# SPDX-License-Identifier: Apache-2.0
"""The examples of the integrations train on a GPU, with the losses of the run without offload."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from operator import eq
from pathlib import Path

import pytest
import torch

from tests.cpu.test_examples import LOSS, NEEDS, skip_without
from tests.dist.programs import ROOT
from tests.gpu.parity import run_twice
from tests.gpu.run_example import run_example

PIPELINING = "with_pipelining.py"
TIMEOUT_S = 200


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    """Start one process for all examples of one GPU: it imports their libraries once."""
    directory = tmp_path_factory.mktemp("examples")  # Trainers make folders where they run
    with ProcessPoolExecutor(1, get_context("spawn"), see_one_gpu, (directory,)) as worker:
        yield worker


def see_one_gpu(directory: Path) -> None:
    """Otherwise a Trainer takes them all, and makes processes of its own for them."""
    os.chdir(directory)
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def run_ranks(name: str, *options: str) -> str:
    """Return what an example prints under torchrun, on two GPUs if there are as many."""
    num_ranks = min(2, torch.cuda.device_count())  # one rank has both of its stages
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), "-m"]
    command = [sys.executable, "-m", *launcher, "tests.gpu.run_example", name, *options]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def check_losses(run: Callable[..., str], name: str, *options: str) -> None:
    """Of two steps: the second one has the gradients of the first."""
    with ThreadPoolExecutor(3) as threads:  # a process imports for most of its time
        ways = [["--no-offload"], ["--no-offload"], []]
        *plain, found = map(LOSS.findall, threads.map(lambda way: run(name, "--steps", "2", *options, *way), ways))
    expected = run_twice(iter(plain).__next__, eq)
    assert found == expected and len(found) >= 2
    assert float(found[-1]) < float(found[0])


@pytest.mark.parametrize("name", [name for name in NEEDS if name != PIPELINING])
def test_losses_are_those_without_offload(name: str, worker: ProcessPoolExecutor) -> None:
    skip_without(*NEEDS[name])
    check_losses(lambda *arguments: worker.submit(run_example, arguments).result(TIMEOUT_S), name)


def test_a_pipeline() -> None:
    check_losses(run_ranks, PIPELINING)


@pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason=f"needs 2 GPUs of one machine for a pipeline of two ranks, there are {torch.cuda.device_count()}",
)
@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_schedules_that_split_or_overlap_backward(schedule: str) -> None:
    check_losses(run_ranks, PIPELINING, "--schedule", schedule)
