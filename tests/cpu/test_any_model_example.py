"""The example of `manage_activations` runs, on the CPU and on a GPU, and says what is true."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "any_model.py"


def run(device: str, folder: Path, *options: str) -> str:
    command = [sys.executable, str(EXAMPLE), "--steps", "3", "--device", device, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_trains_with_the_same_losses_and_less_memory(device: str, tmp_path: Path) -> None:
    offloaded, plain = run(device, tmp_path), run(device, tmp_path, "--no-offload")
    (losses,) = re.findall(r"losses (.*)", offloaded)
    assert f"losses {losses}" in plain and len(set(losses.split())) == 3
    saved, resident, host, late = map(int, re.findall(r"\d+", offloaded.split("saved per step")[1]))
    assert resident < saved / 4 and host >= saved / 2 and late == 0
    assert not list(tmp_path.iterdir())
