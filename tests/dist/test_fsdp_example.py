# SPDX-License-Identifier: Apache-2.0
"""examples/fsdp.py runs, in one process and in two, and offload changes no digit of what it prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.dist.programs import ROOT, run_program

pytest.importorskip("transformers")

EXAMPLE = ROOT / "examples" / "fsdp.py"
STEPS = 3


def test_losses_fall_and_are_the_same_without_offload_and_with_checkpoints(tmp_path: Path) -> None:
    plain, offload, checkpoint = (_run(1, tmp_path, *flags) for flags in (["--no-offload"], [], ["--checkpoint"]))
    losses = _losses(plain, 0)
    assert len(losses) == STEPS and float(losses[-1]) < float(losses[0])
    assert "layers" not in plain and "6 layers, model.layers.0 to model.layers.5" in offload
    assert "6 of 6 layers are checkpointed" in checkpoint
    assert _losses(offload, 0) == _losses(checkpoint, 0) == losses


def test_losses_are_the_same_without_offload_on_two_ranks(tmp_path: Path) -> None:
    plain, offload = _run(2, tmp_path, "--no-offload"), _run(2, tmp_path)
    for rank in (0, 1):
        assert len(_losses(plain, rank)) == STEPS and _losses(plain, rank) == _losses(offload, rank)


def _run(num_ranks: int, cwd: Path, *flags: str) -> str:
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    printed = run_program(EXAMPLE, str(STEPS), *flags, cwd=cwd, num_ranks=num_ranks, environment=environment)
    return "".join(text for of_rank in printed for text in of_rank)


def _losses(printed: str, rank: int) -> list[str]:
    return re.findall(rf"rank {rank}: loss ([\d.]+)", printed)
