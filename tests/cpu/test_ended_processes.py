# SPDX-License-Identifier: Apache-2.0
"""Processes that are ended from outside: by SIGTERM, as a job manager does, or because a peer was killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.dist.launch import RankFailed, collect

TIMEOUT_S = 60  # a loaded machine starts Python in 10
TRAIN = """
import sys
from datetime import timedelta
import torch
from torch import nn
from offload_engine import OffloadConfig, enable_activation_offloading

rank, num_ranks, meeting, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Sigmoid()) for _ in range(4)))
layers, strategy = list(model), "none"
if num_ranks > 1:
    torch.distributed.init_process_group(
        "gloo", f"file://{meeting}", timedelta(seconds=30), rank=rank, world_size=num_ranks
    )
    model, strategy = nn.parallel.DistributedDataParallel(model), "ddp"
config = OffloadConfig(min_tensor_bytes=0, directory=directory)
enable_activation_offloading(model, strategy, layers=layers, config=config)
for step in range(1_000_000):
    model(torch.randn(512, 256)).sum().backward()
    if step == 2:
        print("trains", flush=True)
"""


@contextmanager
def training(directory: Path, num: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Ranks that train and move activations to files, of which none is left when they have ended."""
    tier = directory / "tier"
    tier.mkdir()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TRAIN, str(rank), str(num), str(directory / "meeting"), str(tier)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(num)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "trains\n", process.communicate(timeout=TIMEOUT_S)[1]
        yield processes
        assert not list(tier.iterdir())
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_sigterm_ends_training_at_once_and_leaves_no_file(tmp_path: Path) -> None:
    with training(tmp_path, 1) as [process]:
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == -signal.SIGTERM
        assert time.monotonic() - begin < TIMEOUT_S / 2


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without torch.distributed")
def test_a_killed_peer_ends_training_with_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    with training(tmp_path, 2) as [survivor, killed]:
        begin = time.monotonic()
        killed.kill()
        _, errors = survivor.communicate(timeout=TIMEOUT_S)
        assert time.monotonic() - begin < TIMEOUT_S
        assert survivor.returncode == 1
        assert "RuntimeError" in errors and ("peer" in errors or "gloo" in errors.lower()), errors


@pytest.mark.parametrize("has_read", [True, False])
def test_a_rank_that_has_died_is_told_from_one_that_is_late(has_read: bool) -> None:
    """Its end of a socket is closed, and reset if it had not read all that it was sent."""
    own, of_rank = multiprocessing.Pipe()
    own.send("work")
    if has_read:
        of_rank.recv()
    of_rank.close()
    with pytest.raises(RankFailed, match="rank 0: died without a word"):
        collect([own], timeout_s=5.0)
