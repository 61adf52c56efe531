# SPDX-License-Identifier: Apache-2.0
"""Processes that are ended from outside: by SIGTERM, as a job manager does, or because a peer was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

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


@pytest.mark.parametrize("num_ranks", [1, 2], ids=["by a signal", "by a peer that was killed"])
def test_training_ends_and_leaves_no_file(num_ranks: int, tmp_path: Path) -> None:
    if num_ranks > 1 and not torch.distributed.is_available():
        pytest.skip("this torch was built without torch.distributed")
    tier = tmp_path / "tier"
    tier.mkdir()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TRAIN, str(rank), str(num_ranks), str(tmp_path / "meeting"), str(tier)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(num_ranks)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "trains\n", process.communicate(timeout=TIMEOUT_S)[1]
        begin, survivor = time.monotonic(), processes[0]
        if num_ranks == 1:
            survivor.send_signal(signal.SIGTERM)
        else:
            processes[1].kill()
        _, errors = survivor.communicate(timeout=TIMEOUT_S)
        assert time.monotonic() - begin < TIMEOUT_S / 2 * num_ranks
        assert survivor.returncode == (-signal.SIGTERM if num_ranks == 1 else 1)
        if num_ranks > 1:
            assert "RuntimeError" in errors and ("peer" in errors or "gloo" in errors.lower()), errors
        assert not list(tier.iterdir())
    finally:
        for process in processes:
            process.kill()
            process.communicate()
