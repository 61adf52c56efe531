"""examples/fsdp.py runs, in one process and under torchrun, and offload changes no digit of what it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "fsdp.py"
STEPS = 3


@pytest.mark.parametrize("num_processes", [1, 2])
def test_losses_fall_and_are_the_same_without_offload(num_processes: int, tmp_path: Path) -> None:
    plain, offload = _run(num_processes, tmp_path, "--no-offload"), _run(num_processes, tmp_path)
    losses = _losses(plain, 0)
    assert len(losses) == STEPS and float(losses[-1]) < float(losses[0])
    assert "layers" not in plain and "6 layers, model.layers.0 to model.layers.5" in offload
    assert all(_losses(plain, rank) == _losses(offload, rank) for rank in range(num_processes))


def test_checkpointing_changes_no_digit_either(tmp_path: Path) -> None:
    printed = _run(1, tmp_path, "--checkpoint")
    assert "6 of 6 layers are checkpointed" in printed
    assert _losses(printed, 0) == _losses(_run(1, tmp_path), 0)


def _run(num_processes: int, cwd: Path, *flags: str) -> str:
    command = [sys.executable, str(EXAMPLE), str(STEPS), *flags]
    if num_processes > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
        command[1:1] = torchrun
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def _losses(printed: str, rank: int) -> list[str]:
    return re.findall(rf"rank {rank}: loss ([\d.]+)", printed)
